# The Adam kernels and their workers.
