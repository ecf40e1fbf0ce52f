"""Storage of tensors between uses: on the device, in host memory, in files on a fast local disk (NVMe)."""
