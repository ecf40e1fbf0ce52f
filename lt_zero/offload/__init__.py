"""Memory beyond RAM: tensors that live in files on a fast local disk (NVMe) while nobody needs them."""
