from tests.kernels.conftest import isa as isa
from tests.kernels.conftest import matrix_isa as matrix_isa
