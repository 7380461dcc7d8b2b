"""C++ kernels for the CPU, compiled at first use and called through ctypes."""
