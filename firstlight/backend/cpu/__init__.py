"""The CPU backend: native kernels behind the Backend protocol, no torch."""

from firstlight.backend.cpu.backend import CpuBackend, native_pack, num_cores

__all__ = ["CpuBackend", "native_pack", "num_cores"]
