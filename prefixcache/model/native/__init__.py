"""Our own kernels for CPUs: C++ without dependencies, called through ctypes."""
