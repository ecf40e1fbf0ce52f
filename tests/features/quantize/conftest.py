from tests.kernels.conftest import isa as isa
