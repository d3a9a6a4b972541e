"""Making a torch without CUDA believe in a GPU, as far as fake tensors on ``cuda`` need it.

It refuses even those until a device guard and hooks for CUDA are registered. The stand-in has both, doing nothing. It has
to be loaded before torch is imported, so this belongs into a process of its own (test_device_paths.py starts one).
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from megatron_lite.ops import toolchain

STAND_IN = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getDefaultStream(Device) const override { return getStream(getDevice()); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
"""


def compile_stand_in(out: Path) -> None:
    """Compile the stand-in.

    Raises:
        BuildError: no compiler, or a torch whose headers say something else.
    """
    root = toolchain.find_torch().root
    source = out.with_suffix(".cpp")
    source.write_text(STAND_IN)
    flags = ["-std=c++20", "-shared", "-fPIC", "-isystem", root / "include", "-L", root / "lib"]
    toolchain.run([*toolchain.find_compiler(os.environ), *flags, source, "-o", out, "-lc10", "-ltorch_cpu"])


def pretend(stand_in: Path) -> None:
    """Load the stand-in into this process."""
    assert "torch" not in sys.modules
    root = toolchain.find_torch().root / "lib"
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(root / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(stand_in))
