// A device "cuda" for a build of PyTorch without CUDA: one device, one stream, nothing to wait for.
//
// Autograd asks a device's guard for the stream of every node, and the CUDA hooks whether there is a device at all. What runs on
// this device is decided in Python (pretend.py); nothing here computes.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace {

constexpr auto kKind = c10::DeviceType::CUDA;
const c10::Device kOnly(kKind, 0);
const c10::Stream kDefault(c10::Stream::DEFAULT, kOnly);

struct PretendedGuard final : c10::impl::NoOpDeviceGuardImpl<kKind> {
  c10::Device getDevice() const override { return kOnly; }
  c10::Device exchangeDevice(c10::Device) const override { return kOnly; }
  c10::Stream getStream(c10::Device) const noexcept override { return kDefault; }
  c10::Stream getNewStream(c10::Device, int) const override { return kDefault; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kDefault; }
  bool queryEvent(void*) const override { return true; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};

struct PretendedHooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

// The build's own hooks are a constant that cannot be registered anew: another object takes their place.
const auto* const kHooks = new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) PretendedHooks;

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard);
