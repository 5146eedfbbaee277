// An accelerator that is played: tensors of torch's PrivateUse1 device, whose memory is the host's.
//
// Every operator runs the CPU's kernel on views of the same memory. What a GPU would refuse is refused: tensors of two
// devices in one call. Where the host would wait for a GPU is counted: a number that is read, a shape that depends on
// values, a copy from or to memory that is not pinned.
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

constexpr auto kPlayed = c10::DeviceType::PrivateUse1;
const c10::Device device(kPlayed, 0);

std::mutex lock;
std::vector<std::string> waits;
bool refuses_waits = false;

void wait_for_device(const std::string& why) {
  std::lock_guard<std::mutex> guard(lock);
  TORCH_CHECK(!refuses_waits, "the host waits for the device: ", why);
  waits.push_back(why);
}

// -- memory and streams ------------------------------------------------------------------------------------------------

void drop_data(void* data) { delete static_cast<c10::DataPtr*>(data); }
void drop_storage(void* storage) { delete static_cast<c10::Storage*>(storage); }

struct PlayedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    return {memory->get(), memory, &drop_data, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} played_memory;
REGISTER_ALLOCATOR(kPlayed, &played_memory);

std::unordered_set<const void*> pinned;

void unpin(void* data) {
  auto* memory = static_cast<c10::DataPtr*>(data);
  {
    std::lock_guard<std::mutex> guard(lock);
    pinned.erase(memory->get());
  }
  delete memory;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    std::lock_guard<std::mutex> guard(lock);
    pinned.insert(memory->get());
    return {memory->get(), memory, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(lock);
    return pinned.count(data) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kPlayed> {
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// -- the same memory on both sides -------------------------------------------------------------------------------------

bool is_played(const at::Tensor& x) { return x.defined() && x.device().type() == kPlayed; }

c10::Storage storage_on(const c10::Storage& other, c10::Device where) {
  auto* kept = new c10::Storage(other);
  c10::DataPtr data(other.mutable_data(), kept, &drop_storage, where);
  auto* allocator = where.type() == kPlayed ? static_cast<c10::Allocator*>(&played_memory) : c10::GetCPUAllocator();
  return {c10::Storage::use_byte_size_t(), other.nbytes(), std::move(data), allocator, /*resizable=*/true};
}

at::Tensor tensor_on(const at::Tensor& like, const c10::Storage& storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  return made;
}

at::Tensor zeros_of_host(const at::Tensor& x) { return at::zeros(x.sizes(), x.options().device(c10::kCPU)); }

// Tensors of one call, each by its memory, so that those which share some still do.
struct HostSide {
  std::unordered_map<const c10::StorageImpl*, c10::Storage> to_host, to_played;

  const c10::Storage& host_of(const c10::Storage& storage) {
    auto known = to_host.find(storage.unsafeGetStorageImpl());
    if (known != to_host.end()) return known->second;
    auto host = storage_on(storage, c10::Device(c10::kCPU));
    to_played.emplace(host.unsafeGetStorageImpl(), storage);
    return to_host.emplace(storage.unsafeGetStorageImpl(), std::move(host)).first->second;
  }

  at::Tensor host(const at::Tensor& x) {
    if (!is_played(x)) return x;
    TORCH_CHECK(x.layout() == c10::kStrided, "the played device has strided tensors alone");
    return tensor_on(x, host_of(x.storage()), c10::DispatchKey::CPU);
  }

  at::Tensor played(const at::Tensor& x) {
    if (!x.defined() || x.device().type() != c10::kCPU) return x;
    TORCH_CHECK(x.layout() == c10::kStrided, "the played device has strided tensors alone");
    if (x._is_zerotensor()) return played(zeros_of_host(x));
    auto known = to_played.find(x.storage().unsafeGetStorageImpl());
    auto storage = known != to_played.end() ? known->second : storage_on(x.storage(), device);
    if (known == to_played.end()) to_played.emplace(x.storage().unsafeGetStorageImpl(), storage);
    return tensor_on(x, storage, c10::DispatchKey::PrivateUse1);
  }

  // A result that the CPU's kernel has given another size, and perhaps other memory.
  void follow(const at::Tensor& x, const at::Tensor& host) {
    if (x.sizes() == host.sizes() && x.strides() == host.strides()) return;
    auto* mine = x.storage().unsafeGetStorageImpl();
    if (host.storage().nbytes() != mine->nbytes()) {
      auto moved = storage_on(host.storage(), device);
      mine->set_data_ptr(std::move(moved.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
      mine->set_nbytes(host.storage().nbytes());
    }
    x.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }
};

// -- every operator ----------------------------------------------------------------------------------------------------

const std::unordered_set<std::string> depends_on_values = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::nonzero_static", "aten::masked_select", "aten::equal",
    "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
    "aten::segment_reduce", "aten::_segment_reduce_backward", "aten::repeat_interleave", "aten::histc",
    "aten::_linalg_check_errors", "aten::_embedding_bag",
};
const std::unordered_set<std::string> takes_masks = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  auto arguments = torch::jit::last(stack, count);
  const auto first = stack->size() - count;
  HostSide side;
  std::vector<at::Tensor> all, played_before(count);
  bool has_mask = false, on_device = false;
  auto take = [&](const at::Tensor& x, bool is_index) {
    if (!x.defined()) return x;
    all.push_back(x);
    has_mask |= is_index && (x.scalar_type() == at::kBool || x.scalar_type() == at::kByte);
    on_device |= is_played(x);
    return side.host(x);
  };
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue given = arguments[i];
    auto& place = (*stack)[first + i];
    if (given.isTensor()) {
      played_before[i] = given.toTensor();
      place = take(given.toTensor(), false);
    } else if (given.isTensorList()) {
      c10::List<at::Tensor> hosts;
      for (const at::Tensor& x : given.toTensorVector()) hosts.push_back(take(x, false));
      place = hosts;
    } else if (given.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> hosts;
      for (const std::optional<at::Tensor>& x : given.toOptionalTensorVector())
        hosts.push_back(x.has_value() ? std::optional<at::Tensor>(take(*x, true)) : std::nullopt);
      place = hosts;
    } else if (given.isDevice() && given.toDevice().type() == kPlayed) {
      place = c10::Device(c10::kCPU);
    } else if (given.isStorage()) {
      place = side.host_of(given.toStorage());
    }
  }
  for (const auto& x : all)
    TORCH_CHECK(
        !on_device || is_played(x) || (x.dim() == 0 && x.device().type() == c10::kCPU), "Expected all tensors of ",
        schema.name(), " to be on the played device, but one of shape ", x.sizes(), " is on ", x.device());
  if (depends_on_values.count(schema.name()) || (has_mask && takes_masks.count(schema.name())))
    wait_for_device(schema.name());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  const auto results = schema.returns().size();
  const auto begin = stack->size() - results;
  for (size_t i = 0; i < results; ++i) {
    auto& place = (*stack)[begin + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (place.isTensor()) {
      const auto host = place.toTensor();
      if (alias != nullptr && alias->isWrite()) {
        for (size_t a = 0; a < count; ++a) {
          const auto* other = schema.arguments()[a].alias_info();
          if (other != nullptr && other->isWrite() && *other == *alias) {
            if (is_played(played_before[a])) side.follow(played_before[a], host);
            place = played_before[a];
          }
        }
      } else {
        place = side.played(host);
      }
    } else if (place.isTensorList()) {
      c10::List<at::Tensor> moved;
      for (const at::Tensor& x : place.toTensorVector()) moved.push_back(side.played(x));
      place = moved;
    }
  }
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &played_memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &played_memory, keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (is_played(from) != is_played(to) && from.numel() > 0) {
    const auto& host = is_played(from) ? to : from;
    const bool is_pinned = at::globalContext().getAcceleratorHooksInterface(kPlayed).isPinnedPtr(host.storage().data());
    if (!non_blocking || !is_pinned) wait_for_device(is_played(from) ? "a copy to the host" : "a copy from the host");
  }
  HostSide side;
  side.host(to).copy_(side.host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& set_whole_storage(at::Tensor& x, at::Storage source) {
  const auto rows = static_cast<int64_t>(source.nbytes() / x.dtype().itemsize());
  return at::native::set_storage_cpu_(x, std::move(source), 0, {rows}, {});
}

// Convolutions, which torch leaves to each device by a name of their own.
at::Tensor convolution(
    const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  HostSide side;
  const auto b = bias.has_value() ? std::optional<at::Tensor>(side.host(*bias)) : std::nullopt;
  return side.played(at::convolution(
      side.host(x), side.host(w), b, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> needed) {
  HostSide side;
  const std::vector<int64_t> bias{w.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  const auto [dx, dw, db] = at::convolution_backward(
      side.host(grad), side.host(x), side.host(w), at::OptionalIntArrayRef(bias), stride, padding, dilation, transposed,
      output_padding, groups, needed);
  return {side.played(dx), side.played(dw), side.played(db)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_", &at::native::set_cpu_);
}

// A product that is added up in a wider type, which CPUs do not have.
at::Tensor wide_product(const at::Tensor& x, const at::Tensor& y, at::ScalarType wide) {
  HostSide side;
  return side.played(at::mm(side.host(x).to(wide), side.host(y).to(wide)));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("mm.dtype", &wide_product); }

// A copy reads a lazy conjugate or negative as it is.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// Autocast by the lists that torch has for GPUs.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define NARROW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define WIDE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WIDE_BY_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(NARROW)
  AT_FORALL_FP32(WIDE)
  AT_FORALL_FP32_SET_OPT_DTYPE(WIDE_BY_DTYPE)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("host_view", [](const at::Tensor& x) { return HostSide().host(x); });
  m.def("refuse_waits", [](bool refuse) { refuses_waits = refuse; });
  m.def("take_waits", [] {
    std::lock_guard<std::mutex> guard(lock);
    std::vector<std::string> taken;
    taken.swap(waits);
    return taken;
  });
}
