// A device made of this machine's memory: to torch it is another device than the CPU, with an allocator, a guard and
// kernels of its own, which are those of the CPU. What would fail on a card, because tensors of two devices meet, fails
// here; and what a card would wait for, an element that is read or a copy to the CPU, is counted.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace {

constexpr auto CARD = c10::DeviceType::PrivateUse1;
const c10::Device ONLY(CARD, 0);

std::atomic<int64_t> reads{0};           // elements that were read, and copies to the CPU
std::atomic<int64_t> kernels{0};         // operations that were carried out
thread_local bool falls_back = false;    // this thread carries out an operation, and its copies do not count
std::atomic<int64_t> allocated{0}, most{0}, limit{-1};  // bytes

// ---- memory

struct Memory final : c10::Allocator {
  static void release(void* context) {
    auto* start = static_cast<char*>(context) - 64;
    allocated -= *reinterpret_cast<int64_t*>(start);
    std::free(start);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &release_nothing, ONLY};
    TORCH_CHECK_WITH(
        OutOfMemoryError, limit < 0 || allocated + static_cast<int64_t>(nbytes) <= limit, "card out of memory");
    void* start = nullptr;
    TORCH_CHECK(posix_memalign(&start, 64, nbytes + 64) == 0, "no memory");
    *static_cast<int64_t*>(start) = static_cast<int64_t>(nbytes);
    allocated += static_cast<int64_t>(nbytes);
    for (auto now = allocated.load(), before = most.load(); now > before && !most.compare_exchange_weak(before, now);) {
    }
    void* data = static_cast<char*>(start) + 64;
    return {data, data, &release, ONLY};
  }
  static void release_nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* into, const void* from, size_t nbytes) const override { std::memcpy(into, from, nbytes); }
};

Memory memory;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<CARD> {
  c10::Device exchangeDevice(c10::Device) const override { return ONLY; }
  c10::Device getDevice() const override { return ONLY; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, ONLY); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, ONLY); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, ONLY);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto found = memory.allocate(nbytes);
    const auto kept = std::min(nbytes, storage.nbytes());
    if (kept) std::memcpy(found.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(found));
    storage.set_nbytes(nbytes);
  }
};

// ---- kernels

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// The same memory, as the CPU's.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  auto found = at::from_blob(
      tensor.numel() ? tensor.data_ptr() : nullptr, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  if (tensor.is_conj()) found._set_conj(true);
  if (tensor.is_neg()) found._set_neg(true);
  return found;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& into, bool) {
  if (!falls_back) {
    if (!into.is_privateuseone()) ++reads;
    ++kernels;
  }
  on_cpu(into).copy_(on_cpu(self));
  return into;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& into) {
  at::native::resize_(into, self.sizes(), std::nullopt);
  on_cpu(into).copy_(on_cpu(self));
  return into;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  ++reads;
  return on_cpu(self).item();
}

at::Tensor& set_storage(
    at::Tensor& result, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(result, storage, offset, size, stride);
}

at::Tensor& set_all(at::Tensor& result, at::Storage storage) {
  const auto n = static_cast<int64_t>(storage.nbytes() / result.dtype().itemsize());
  return at::native::set_storage_cpu_(result, storage, 0, {n}, {});
}

// Operations that take tensors of the CPU beside those of a card, too.
bool mixes(std::string_view name) {
  return name.find("index") != std::string_view::npos || name.find("copy") != std::string_view::npos;
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++kernels;
  const auto& schema = op.schema();
  auto card = false, cpu = false;
  const auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    card |= tensor.is_privateuseone();
    cpu |= tensor.is_cpu() && tensor.dim() > 0;
  };
  for (const auto& given : torch::jit::last(*stack, schema.arguments().size())) {
    if (given.isTensor()) look(given.toTensor());
    if (given.isTensorList()) {
      for (const auto& tensor : given.toTensorVector()) look(tensor);
    }
  }
  TORCH_CHECK(
      !card || !cpu || mixes(schema.name()),
      "Expected all tensors to be on the same device, but found at least two devices, card:0 and cpu! (", schema.name(),
      ")");
  const struct Falls {
    Falls() { falls_back = true; }
    ~Falls() { falls_back = false; }
  } falls;
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("unfold", at::native::unfold);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage", set_all);
  m.impl("set_.source_Storage_storage_offset", set_storage);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

extern "C" {
void card_begin() {
  static Hooks hooks;
  c10::SetAllocator(CARD, &memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
int64_t card_reads() { return reads; }
int64_t card_kernels() { return kernels; }
int64_t card_allocated() { return allocated; }
int64_t card_most() { return most; }
void card_forget_most() { most = allocated.load(); }
void card_limit(int64_t bytes) { limit = bytes; }
int64_t card_free() { return limit < 0 ? int64_t{1} << 40 : limit - allocated; }
}
