"""Files and memory for files: direct I/O, thread pools, pinned buffers, checksums, private folders."""
