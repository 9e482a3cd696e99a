// The way of a saved tensor through pack and unpack, without Python: as in saved_fields.py and the hooks, to the bit.
//
// Only common cases are here. Each other one is passed on to the Python function that serves it without this
// extension, before anything has been changed. Private names of torch, read in 2.13: THPVariable_Unpack, THPVariable_Wrap,
// functionToPyObject, Node::metadata (a PyAnomalyMetadata), get_current_graph_task_id.
#include <Python.h>
#include <structmember.h>
#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_anomaly_mode.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <memory>
#include <vector>

namespace {

using torch::autograd::Node;

constexpr long long NEVER = -2;
constexpr long long NO_NODE = -1;
enum Turn { ABSENT, SLOT, EDGE, LEAF, FURTHER, CAPTURED };

// --- owned references

struct Ref {
  PyObject* it = nullptr;
  Ref() = default;
  explicit Ref(PyObject* owned) : it(owned) {}
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  Ref(Ref&& other) noexcept : it(other.it) { other.it = nullptr; }
  Ref& operator=(Ref&& other) noexcept {
    std::swap(it, other.it);
    return *this;
  }
  ~Ref() { Py_XDECREF(it); }
  PyObject* release() {
    PyObject* found = it;
    it = nullptr;
    return found;
  }
  explicit operator bool() const { return it != nullptr; }
};

Ref borrowed(PyObject* it) {
  Py_XINCREF(it);
  return Ref(it);
}
bool is_none(PyObject* it) { return it == nullptr || it == Py_None; }

// --- what Python lends: see `lend`

#define NAMES(X)                                                                                                      \
  X(scope) X(frame) X(observer) X(needed) X(ordinal) X(learnt) X(held) X(actions) X(recompute) X(path) X(packer)         \
  X(versions) X(address) X(node) X(builder) X(owners) X(relied_on) X(hold_leaf)          \
  X(unless) X(data) X(unpack_hook) X(function) X(into) X(operands) X(make)       \
  X(shape) X(dtype) X(count) X(values) X(_expected) X(out) X(_frame)         \
  X(_inside_another) X(_operator) X(_is_complete) X(_place) X(_last) X(_wanted) X(_at) X(_holds) X(fresh) X(handed_over) \
  X(as_saved) X(hold) X(spare) X(takes_values) X(_waits) X(_values) X(_most) X(_newest) X(_storages)       \
  X(watched) X(table) X(look_up)
#define DECLARE(name) PyObject* s_##name;
NAMES(DECLARE)
#define LENT(X)                                                                                                        \
  X(Value) X(Handle) X(Recompute) X(ChainedRecompute) X(observed) X(materialize) X(make_in_python)                     \
  X(changed_in_place) X(lay_out) X(set_version) X(signed_constant) X(in_slot) X(unpack_in_python) X(strided)           \
  X(keys) X(noted_key) X(raw_saved) X(StopReplay) X(saved) X(unpack) X(Parameter) X(aliases) X(overwritten)            \
  X(writes)
#define DECLARE_LENT(name) PyObject* lent_##name;
LENT(DECLARE_LENT)

// --- values, handles and recomputes: the fields of saved_fields.py

struct Value {
  PyObject_HEAD PyObject *tensor, *maker, *leaf, *original, *places;
  long long version, output, readers, reads, last_backward;
  char is_partial, is_intermediate;
};
struct Handle {
  PyObject_HEAD PyObject *value, *view;
  long long last_backward;
};
struct Recompute {
  PyObject_HEAD PyObject *recipe, *operands, *places, *constants, *stride, *captured_sites, *sharded, *over;
  char has_passed;
};

Value* find_value(Handle* handle) { return reinterpret_cast<Value*>(handle->value); }
const at::Tensor& unwrapped(PyObject* tensor) { return THPVariable_Unpack(tensor); }
long long version_of(PyObject* tensor) { return static_cast<long long>(unwrapped(tensor)._version()); }
void set(PyObject*& field, PyObject* owned) {
  PyObject* before = field;
  field = owned;
  Py_XDECREF(before);
}

#define VISIT_VALUE(F) F(tensor) F(maker) F(leaf) F(original) F(places)
#define VISIT_HANDLE(F) F(value) F(view)
#define VISIT_RECOMPUTE(F) F(recipe) F(operands) F(places) F(constants) F(stride) F(captured_sites) F(sharded) F(over)
#define TRAVERSE(name) Py_VISIT(self->name);
#define CLEAR(name) Py_CLEAR(self->name);

int value_traverse(Value* self, visitproc visit, void* arg) {
  VISIT_VALUE(TRAVERSE)
  return 0;
}
int value_clear(Value* self) {
  VISIT_VALUE(CLEAR)
  return 0;
}
void value_dealloc(Value* self) {
  PyObject_GC_UnTrack(self);
  value_clear(self);
  Py_TYPE(self)->tp_free(reinterpret_cast<PyObject*>(self));
}
int handle_traverse(Handle* self, visitproc visit, void* arg) {
  VISIT_HANDLE(TRAVERSE)
  return 0;
}
int handle_clear(Handle* self) {
  if (self->value != nullptr) {
    Value* value = find_value(self);
    value->readers -= 1;
    if (self->last_backward != NEVER && self->last_backward == value->last_backward) {
      value->reads -= 1;
    } else if (value->reads == value->readers && !is_none(value->maker)) {
      Py_CLEAR(value->tensor);
    }
  }
  VISIT_HANDLE(CLEAR)
  return 0;
}
void handle_dealloc(Handle* self) {
  PyObject_GC_UnTrack(self);
  handle_clear(self);
  Py_TYPE(self)->tp_free(reinterpret_cast<PyObject*>(self));
}
int recompute_traverse(Recompute* self, visitproc visit, void* arg) {
  VISIT_RECOMPUTE(TRAVERSE)
  return 0;
}
int recompute_clear(Recompute* self) {
  VISIT_RECOMPUTE(CLEAR)
  return 0;
}
void recompute_dealloc(Recompute* self) {
  PyObject_GC_UnTrack(self);
  recompute_clear(self);
  Py_TYPE(self)->tp_free(reinterpret_cast<PyObject*>(self));
}

void fill(Value* self, PyObject* tensor, PyObject* maker, long long output) {
  self->version = is_none(tensor) ? -1 : version_of(tensor);
  set(self->tensor, is_none(tensor) ? nullptr : Py_NewRef(tensor));
  set(self->maker, is_none(maker) ? nullptr : Py_NewRef(maker));
  self->output = output;
  self->last_backward = NEVER;
}
int value_init(Value* self, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"tensor", "maker", "output", nullptr};
  PyObject *tensor = nullptr, *maker = nullptr;
  long long output = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O$OL", const_cast<char**>(names), &tensor, &maker, &output)) return -1;
  fill(self, tensor, maker, output);
  set(self->leaf, PyLong_FromLong(0));
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}
int handle_init(Handle* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"value", "view", nullptr};
  PyObject *value = nullptr, *view = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O", const_cast<char**>(names), &value, &view)) return -1;
  set(self->value, Py_NewRef(value));
  set(self->view, is_none(view) ? nullptr : Py_NewRef(view));
  self->last_backward = NEVER;
  find_value(self)->readers += 1;
  return 0;
}
void fill(
    Recompute* self, PyObject* recipe, PyObject* operands, PyObject* places, PyObject* constants, PyObject* stride,
    PyObject* captured_sites, bool goes_into) {
  set(self->recipe, Py_NewRef(recipe));
  set(self->operands, Py_NewRef(operands));
  set(self->places, Py_NewRef(places));
  set(self->constants, Py_NewRef(constants));
  set(self->stride, Py_NewRef(stride));
  set(self->captured_sites, Py_NewRef(captured_sites));
  set(self->sharded, PyTuple_New(0));
  self->has_passed = 0;
  if (goes_into) {
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(operands); ++n) {
      PyObject* each = PyTuple_GET_ITEM(operands, n);
      if (each != Py_None) self->has_passed |= find_value(reinterpret_cast<Handle*>(each))->is_intermediate;
    }
  }
}
PyObject *no_sites, *no_constants;  // an empty frozenset and an empty dict, which nothing adds to
int recompute_init(Recompute* self, PyObject* args, PyObject*) {
  PyObject *recipe, *operands, *places, *constants, *stride, *captured_sites = no_sites;
  if (!PyArg_ParseTuple(args, "OOOOO|O", &recipe, &operands, &places, &constants, &stride, &captured_sites)) return -1;
  Ref into(PyObject_GetAttr(recipe, s_into));
  if (!into) return -1;
  fill(self, recipe, operands, places, constants, stride, captured_sites, into.it == Py_True);
  return 0;
}

template <class T>
T* fresh(PyObject* kind) {
  return reinterpret_cast<T*>(reinterpret_cast<PyTypeObject*>(kind)->tp_alloc(reinterpret_cast<PyTypeObject*>(kind), 0));
}
Ref new_value(PyObject* tensor, PyObject* maker, long long output) {
  Value* self = fresh<Value>(lent_Value);
  if (self == nullptr) throw python_error();
  Ref owned(reinterpret_cast<PyObject*>(self));
  fill(self, tensor, maker, output);
  self->leaf = PyLong_FromLong(0);
  return owned;
}
Ref new_handle(PyObject* value, PyObject* view) {
  Handle* self = fresh<Handle>(lent_Handle);
  if (self == nullptr) throw python_error();
  self->value = Py_NewRef(value);
  self->view = is_none(view) ? nullptr : Py_NewRef(view);
  self->last_backward = NEVER;
  find_value(self)->readers += 1;
  return Ref(reinterpret_cast<PyObject*>(self));
}

Ref checked(PyObject* owned) {
  if (owned == nullptr) throw python_error();
  return Ref(owned);
}
Ref attribute(PyObject* of, PyObject* name) { return checked(PyObject_GetAttr(of, name)); }
Ref call(PyObject* function, std::initializer_list<PyObject*> arguments) {
  return checked(PyObject_Vectorcall(function, arguments.begin(), arguments.size(), nullptr));
}

// --- unpacking

[[noreturn]] void raise_changed(PyObject* tensor, long long version) {
  Ref number = checked(PyLong_FromLongLong(version));
  Ref text = call(lent_changed_in_place, {tensor, number.it});
  PyErr_SetObject(PyExc_RuntimeError, text.it);
  throw python_error();
}
bool is_observed() {
  PyObject* observer = PyDict_GetItem(lent_observed, s_observer);
  return !is_none(observer);
}

Ref read(Handle* handle);

// `goes_into` of recompute.py
bool goes_into(const at::Tensor& other, const at::Tensor& tensor) {
  if (other.dim() == 0) return !other.is_complex();
  if (other.scalar_type() != tensor.scalar_type()) return false;
  if (other.sizes() == tensor.sizes()) return other.strides() == tensor.strides();
  if (!other.is_contiguous() || !tensor.is_contiguous() || other.dim() > tensor.dim()) return false;
  for (int64_t n = 1; n <= other.dim(); ++n)
    if (other.size(-n) != 1 && other.size(-n) != tensor.size(-n)) return false;
  return true;
}

// `can_hold_result` of recompute.py
bool can_hold_result(PyObject* wrapped, const std::vector<PyObject*>& operands) {
  const at::Tensor& tensor = unwrapped(wrapped);
  for (PyObject* other : operands)
    if (other != Py_None && other != wrapped && !goes_into(unwrapped(other), tensor)) return false;
  return tensor.is_floating_point() && tensor.dim() > 0 && tensor.nbytes() == tensor.storage().nbytes() &&
      !tensor.is_view() && tensor.use_count() == 1 && tensor.storage().use_count() == 1;
}

Ref list_of(const std::vector<PyObject*>& items) {
  Ref made = checked(PyList_New(0));
  for (PyObject* each : items)
    if (PyList_Append(made.it, each)) throw python_error();
  return made;
}

bool is_any_autocast() {
  for (c10::DeviceType type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES)
    if (at::autocast::is_autocast_enabled(type)) return true;
  return false;
}

Ref run_recipe(Recompute* self, Value* value) {
  bool is_common = !PyTuple_GET_SIZE(self->sharded) && !is_observed() && !at::GradMode::is_enabled() && !is_any_autocast();
  Py_ssize_t count = PyTuple_GET_SIZE(self->operands);
  for (Py_ssize_t n = 0; is_common && n < count; ++n) {
    PyObject* each = PyTuple_GET_ITEM(self->operands, n);
    if (each == Py_None) continue;
    Value* held = find_value(reinterpret_cast<Handle*>(each));
    is_common = !(is_none(held->maker) && !is_none(held->tensor) && version_of(held->tensor) != held->version);
  }
  if (!is_common)
    return call(lent_make_in_python, {reinterpret_cast<PyObject*>(self), reinterpret_cast<PyObject*>(value)});
  std::vector<Ref> tensors;
  std::vector<PyObject*> arguments;
  bool is_plain = true;
  tensors.reserve(count);
  for (Py_ssize_t n = 0; n < count; ++n) {
    PyObject* each = PyTuple_GET_ITEM(self->operands, n);
    tensors.push_back(each == Py_None ? borrowed(Py_None) : read(reinterpret_cast<Handle*>(each)));
    arguments.push_back(tensors.back().it);
    is_plain = is_plain && (each == Py_None || THPVariable_CheckExact(tensors.back().it));
  }
  Ref constants = borrowed(self->constants);
  if (!is_none(self->places) || self->has_passed) constants = checked(PyDict_Copy(self->constants));
  if (self->has_passed && !is_plain) {
    Ref all = list_of(arguments), spare = attribute(reinterpret_cast<PyObject*>(self), s_spare);
    if (PyDict_Update(constants.it, call(spare.it, {all.it}).it)) throw python_error();
  } else if (self->has_passed) {  // as `spare`
    set(self->over, Py_NewRef(Py_None));
    for (Py_ssize_t n = 0; n < count; ++n) {
      Handle* handle = reinterpret_cast<Handle*>(PyTuple_GET_ITEM(self->operands, n));
      if (arguments[n] == Py_None || !is_none(handle->view)) continue;
      Value* held = find_value(handle);
      if (!held->is_intermediate || held->readers != 1 || !is_none(held->tensor) || !can_hold_result(arguments[n], arguments)) continue;
      set(self->over, Py_NewRef(handle->value));
      if (PyDict_SetItem(constants.it, s_out, arguments[n])) throw python_error();
      break;
    }
  }
  if (!is_none(self->places)) {
    PyObject *name, *place;
    for (Py_ssize_t at = 0; PyDict_Next(self->places, &at, &name, &place);) {
      Ref argument;
      if (PyLong_Check(place)) {
        argument = borrowed(arguments[PyLong_AsLong(place)]);
      } else {  // a slice, for a parameter that takes a list
        argument = checked(PyObject_GetItem(list_of(arguments).it, place));
      }
      if (PyDict_SetItem(constants.it, name, argument.it)) throw python_error();
    }
    arguments.clear();
  }
  Ref function = attribute(self->recipe, s_function);
  Ref made = checked(PyObject_VectorcallDict(function.it, arguments.data(), arguments.size(), PyDict_GET_SIZE(constants.it) ? constants.it : nullptr));
  if (PyTuple_Check(made.it)) made = borrowed(PyTuple_GET_ITEM(made.it, value->output));
  if (!is_none(self->stride)) {
    const at::Tensor& tensor = unwrapped(made.it);
    at::IntArrayRef strides = tensor.strides();
    bool is_same = tensor.storage_offset() == 0 && static_cast<Py_ssize_t>(strides.size()) == PyTuple_GET_SIZE(self->stride);
    for (size_t n = 0; is_same && n < strides.size(); ++n)
      is_same = PyLong_AsLongLong(PyTuple_GET_ITEM(self->stride, n)) == strides[n];
    if (!is_same) made = call(lent_lay_out, {made.it, self->stride});
  }
  if (value->version != -1 && value->version != version_of(made.it)) {
    Ref version = checked(PyLong_FromLongLong(value->version));
    call(lent_set_version, {made.it, version.it});
  }
  long long number = torch::autograd::get_current_graph_task_id();
  if (value->last_backward != number) value->last_backward = number, value->reads = 0;
  if (is_none(value->tensor) && value->readers > value->reads) set(value->tensor, Py_NewRef(made.it));
  return made;
}

Ref make(PyObject* maker, Value* value) {
  if (Py_TYPE(maker) == reinterpret_cast<PyTypeObject*>(lent_Recompute))
    return run_recipe(reinterpret_cast<Recompute*>(maker), value);
  return checked(PyObject_CallMethodOneArg(maker, s_make, reinterpret_cast<PyObject*>(value)));
}

// `materialize` of saved_fields.py
Ref materialized(Value* value) {
  std::vector<Value*> pending{value};
  while (true) {
    Value* top = pending.back();
    if (!is_none(top->tensor) && top != value) {
      pending.pop_back();
      continue;
    }
    PyObject* maker = top->maker;
    Ref given;
    bool is_chained = !is_none(maker) && Py_TYPE(maker) == reinterpret_cast<PyTypeObject*>(lent_ChainedRecompute);
    if (!is_none(maker) && !is_chained) {
      bool is_recompute = Py_TYPE(maker) == reinterpret_cast<PyTypeObject*>(lent_Recompute);
      given = is_recompute ? borrowed(reinterpret_cast<Recompute*>(maker)->operands) : attribute(maker, s_operands);
    }
    if (!given || !PyTuple_Check(given.it)) {
      if (top == value) return call(lent_materialize, {reinterpret_cast<PyObject*>(value)});
      call(lent_materialize, {reinterpret_cast<PyObject*>(top)});
      continue;
    }
    PyObject* operands = given.it;
    size_t before = pending.size();
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(operands); ++n) {
      if (PyTuple_GET_ITEM(operands, n) == Py_None) continue;
      Handle* operand = reinterpret_cast<Handle*>(PyTuple_GET_ITEM(operands, n));
      Value* held = find_value(operand);
      if (operand->last_backward != NEVER) {  // as `Handle.wait`
        if (operand->last_backward == held->last_backward) held->reads -= 1;
        operand->last_backward = NEVER;
      }
      if (is_none(held->tensor)) pending.push_back(held);
    }
    if (pending.size() > before) continue;
    Ref owned = borrowed(maker);
    Ref made = make(maker, top);
    if (top == value) return made;
  }
}

Ref read(Handle* handle) {
  Value* value = find_value(handle);
  Ref tensor = borrowed(is_none(value->tensor) ? nullptr : value->tensor);
  if (!is_none(value->maker)) {
    if (!tensor) tensor = materialized(value);
    long long number = torch::autograd::get_current_graph_task_id();
    if (value->last_backward != number) value->last_backward = number, value->reads = 0;
    if (handle->last_backward != number) handle->last_backward = number, value->reads += 1;
    if (value->reads == value->readers) Py_CLEAR(value->tensor);
  } else if (!tensor) {
    PyErr_SetString(PyExc_AssertionError, "a kept value without a tensor");
    throw python_error();
  } else if (version_of(tensor.it) != value->version) {
    raise_changed(tensor.it, value->version);
  }
  PyObject* view = handle->view;
  if (is_none(view)) return tensor;
  if (!PyTuple_Check(view)) return borrowed(view);
  return call(lent_strided, {tensor.it, PyTuple_GET_ITEM(view, 0), PyTuple_GET_ITEM(view, 1), PyTuple_GET_ITEM(view, 2)});
}

PyObject* handle_get(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  Ref alive = borrowed(self);
  return read(reinterpret_cast<Handle*>(self)).release();
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject*, PyObject* packed) {
  HANDLE_TH_ERRORS
  if (PyTuple_CheckExact(packed)) {
    PyObject* tensor = PyTuple_GET_ITEM(packed, 0);
    long long version = PyLong_AsLongLong(PyTuple_GET_ITEM(packed, 1));
    if (version_of(tensor) != version) raise_changed(tensor, version);
    return Py_NewRef(tensor);
  }
  if (is_observed()) return call(lent_unpack_in_python, {packed}).release();
  return read(reinterpret_cast<Handle*>(packed)).release();
  END_HANDLE_TH_ERRORS
}

// --- packing

// The values of a node's outputs are in its metadata, under the keys that Python uses: both paths find them.
PyObject* metadata(Node& node) {
  return static_cast<torch::autograd::PyAnomalyMetadata*>(node.metadata())->dict();
}
PyObject* key_of(long long output) {
  return output < PyTuple_GET_SIZE(lent_keys) ? PyTuple_GET_ITEM(lent_keys, output) : nullptr;
}
Ref registered(Node& node, long long output) {
  PyObject* reference = PyDict_GetItem(metadata(node), key_of(output));
  if (reference == nullptr) return Ref();
  PyObject* found = PyWeakref_GetObject(reference);
  return borrowed(found == Py_None ? nullptr : found);
}
void enter(Node& node, long long output, PyObject* value) {
  Ref reference = checked(PyWeakref_NewRef(value, nullptr));
  if (PyDict_SetItem(metadata(node), key_of(output), reference.it)) throw python_error();
}

using NodePointer = decltype(torch::autograd::Edge::function);  // shared_ptr before 2.13, intrusive_ptr since

Ref strides_of(const at::Tensor& tensor) {
  at::IntArrayRef strides = tensor.strides();
  Ref made = checked(PyTuple_New(strides.size()));
  for (size_t n = 0; n < strides.size(); ++n) PyTuple_SET_ITEM(made.it, n, PyLong_FromLongLong(strides[n]));
  return made;
}

// The tensor behind a view, as `whole` finds it; an undefined one where that takes a closer look.
at::Tensor whole(PyObject* wrapped) {
  const at::Tensor& tensor = unwrapped(wrapped);
  if (!THPVariable_CheckExact(wrapped) || tensor.layout() != at::kStrided) return at::Tensor();
  if (!tensor.is_view()) return tensor;
  at::Tensor base(tensor._base());
  bool is_plain = base.layout() == at::kStrided && !base.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
  bool is_same = is_plain && base.scalar_type() == tensor.scalar_type() && !tensor.is_conj() && !tensor.is_neg();
  return is_same ? base : at::Tensor();
}

// The captured operand of a node; nothing if there is none, or its value was freed: `find_captured_operand`. Adds its site.
Ref captured(Node& node, PyObject* name, Ref& sites) {
  PyObject* known = PyDict_GetItem(metadata(node), lent_noted_key);
  PyObject* found = known == nullptr ? nullptr : PyDict_GetItem(known, name);
  if (found == nullptr) return Ref();
  PyObject* operand = PyTuple_GET_ITEM(found, 1);
  if (PyWeakref_Check(operand)) operand = PyWeakref_GetObject(operand);
  if (operand == Py_None) return Ref();
  if (!sites) sites = checked(PySet_New(nullptr));
  if (PySet_Add(sites.it, PyTuple_GET_ITEM(found, 0))) throw python_error();
  return borrowed(operand);
}
bool is_number(PyObject* it) { return PyLong_Check(it) || PyFloat_Check(it) || PyComplex_Check(it); }

// `ReliedOn.of`; False, before anything has been changed, where Python has to look more closely
bool rely_on(PyObject* relied_on, Value* value, PyObject* wrapped) {
  const at::Tensor& tensor = unwrapped(wrapped);
  Ref values = attribute(relied_on, s__values), most = attribute(relied_on, s__most);
  if (PyDict_Size(lent_aliases) || !tensor.has_storage() || !tensor.storage().resizable() ||
      attribute(relied_on, s_takes_values).it != Py_True || attribute(relied_on, s__waits).it == Py_True ||
      PyList_GET_SIZE(values.it) >= PyLong_AsLongLong(most.it))
    return false;
  Ref reference = checked(PyWeakref_NewRef(reinterpret_cast<PyObject*>(value), nullptr));
  Ref storage = checked(PyLong_FromVoidPtr(tensor.storage().unsafeGetStorageImpl()));
  set(value->original, checked(PyWeakref_NewRef(wrapped, nullptr)).release());
  if (PyList_Append(values.it, reference.it) || PySet_Add(attribute(relied_on, s__storages).it, storage.it) ||
      PyObject_SetAttr(relied_on, s__newest, reference.it) || PyDict_SetItem(lent_writes, s_watched, Py_True))
    throw python_error();
  return true;
}
Ref relied_on_by(PyObject* builder) { return attribute(attribute(builder, s_owners).it, s_relied_on); }
bool is_plain(PyObject* tensor) {
  return THPVariable_CheckExact(tensor) && unwrapped(tensor).layout() == at::kStrided;
}

// `ReliedOn.hold_leaf`
Ref hold_leaf(PyObject* relied_on, PyObject* leaf) {
  if (is_plain(leaf) && !PyDict_Size(lent_overwritten)) {
    Ref detached = checked(THPVariable_Wrap(unwrapped(leaf).detach()));
    Ref value = new_value(detached.it, nullptr, NO_NODE);
    Value* made = reinterpret_cast<Value*>(value.it);
    if (Py_TYPE(leaf) == reinterpret_cast<PyTypeObject*>(lent_Parameter)) set(made->leaf, checked(PyLong_FromVoidPtr(leaf)).release());
    if (rely_on(relied_on, made, leaf)) return value;
  }
  return checked(PyObject_CallMethodOneArg(relied_on, s_hold_leaf, leaf));
}

// `ReliedOn.hold_slot` of a tensor; nothing where Python has to look more closely
Ref of_tensor(PyObject* relied_on, PyObject* saved) {
  if (!is_plain(saved) || PyDict_Size(lent_overwritten)) return Ref();
  const at::Tensor& tensor = unwrapped(saved);
  bool is_number = !tensor.requires_grad() && tensor.dim() == 0;
  Ref held = is_number ? borrowed(saved) : checked(THPVariable_Wrap(tensor.detach()));
  Ref value = new_value(held.it, nullptr, 0);
  bool is_settled = tensor.grad_fn() || attribute(relied_on, s_takes_values).it != Py_True ||
      rely_on(relied_on, reinterpret_cast<Value*>(value.it), tensor.requires_grad() ? saved : held.it);
  return is_settled ? new_handle(value.it, nullptr) : Ref();
}

// `in_slot` of recompute_path.py
Ref in_slot(PyObject* builder, PyObject* node, PyObject* name) {
  Ref place = checked(PyUnicode_Concat(lent_raw_saved, name));
  Ref slot = attribute(node, place.it);
  Ref data = attribute(slot.it, s_data), operand;
  if (Py_TYPE(data.it) == reinterpret_cast<PyTypeObject*>(lent_Handle)) {
    Handle* handle = reinterpret_cast<Handle*>(data.it);
    if (find_value(handle)->is_partial) return Ref();
    if (find_value(handle)->output != NO_NODE) return new_handle(handle->value, handle->view);
  } else if (THPVariable_Check(data.it) && is_none(attribute(slot.it, s_unpack_hook).it)) {
    place = checked(PyUnicode_Concat(lent_saved, name));
    Ref tensor(PyObject_GetAttr(node, place.it));
    if (!tensor) {
      if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) throw python_error();
      PyErr_Clear();  // the tensor has been written to
      return Ref();
    }
    operand = of_tensor(relied_on_by(builder).it, tensor.it);
  } else if (PyTuple_CheckExact(data.it) && attribute(slot.it, s_unpack_hook).it == lent_unpack) {
    PyObject* tensor = PyTuple_GET_ITEM(data.it, 0);
    if (version_of(tensor) != PyLong_AsLongLong(PyTuple_GET_ITEM(data.it, 1))) return Ref();
    operand = of_tensor(relied_on_by(builder).it, tensor);
  }
  if (!operand) operand = call(lent_in_slot, {builder, node, name});
  return operand.it == Py_None ? Ref() : std::move(operand);
}

// `RecomputePath.follow` of a path that has a table; nothing if the path has changed
enum Column { KIND, RECIPE, RECORDED, WHEN, TURNS, NUMBERS, LOOKS_UP, PLACES, INTO };
Ref follow(
    PyObject* path, PyObject* table, PyObject* builder, const Ref* given, const NodePointer& owner, long long output, const at::Tensor* like) {
  Node& node = *owner;
  auto column = [table](Column place) { return PyTuple_GET_ITEM(table, place); };
  PyObject *recipe = column(RECIPE), *recorded = column(RECORDED), *when = column(WHEN), *turns = column(TURNS),
           *numbers = column(NUMBERS);
  Ref python_node(given != nullptr ? Py_NewRef(given->it) : nullptr);
  auto as_object = [&]() -> PyObject* {
    if (!python_node) python_node = checked(torch::autograd::functionToPyObject(owner));
    return python_node.it;
  };
  bool has_constants = PyTuple_GET_SIZE(recorded) || PyTuple_GET_SIZE(numbers) || column(LOOKS_UP) == Py_True;
  Ref constants = has_constants ? checked(PyDict_New()) : borrowed(no_constants);
  for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(recorded); ++n) {
    PyObject* pair = PyTuple_GET_ITEM(recorded, n);
    Ref constant = attribute(as_object(), PyTuple_GET_ITEM(pair, 1));
    if (!(PyBool_Check(constant.it) || PyFloat_CheckExact(constant.it) || constant.it == Py_None))
      constant = call(lent_signed_constant, {constant.it});
    if (PyDict_SetItem(constants.it, PyTuple_GET_ITEM(pair, 0), constant.it)) throw python_error();
  }
  for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(when); ++n) {
    PyObject* pair = PyTuple_GET_ITEM(when, n);
    PyObject* constant = PyDict_GetItem(constants.it, PyTuple_GET_ITEM(pair, 0));
    int is_as_wanted = constant == nullptr ? 1 : PyObject_RichCompareBool(constant, PyTuple_GET_ITEM(pair, 1), Py_EQ);
    if (is_as_wanted < 0) throw python_error();
    if (!is_as_wanted) return Ref();
  }
  Ref sites;
  Py_ssize_t count = PyTuple_GET_SIZE(turns);
  Ref operands = checked(PyTuple_New(count));
  for (Py_ssize_t n = 0; n < count; ++n) PyTuple_SET_ITEM(operands.it, n, Py_NewRef(Py_None));
  for (Py_ssize_t n = 0; n < count; ++n) {
    PyObject* turn = PyTuple_GET_ITEM(turns, n);
    PyObject *name = PyTuple_GET_ITEM(turn, 1), *empty = PyTuple_GET_ITEM(turn, 2);
    long kind = PyLong_AsLong(PyTuple_GET_ITEM(turn, 0)), place = PyLong_AsLong(PyTuple_GET_ITEM(turn, 3));
    if (PyUnicode_GET_LENGTH(empty)) {
      Ref slot = attribute(as_object(), empty);
      if (!is_none(attribute(slot.it, s_data).it) || !is_none(attribute(slot.it, s_unpack_hook).it)) return Ref();
    }
    Ref operand;
    if (kind == SLOT) {
      operand = in_slot(builder, as_object(), name);
      if (!operand) return Ref();
    } else if (kind == CAPTURED) {
      Ref found = captured(node, name, sites);
      if (!found || is_number(found.it)) return Ref();
      if (Py_TYPE(found.it) != reinterpret_cast<PyTypeObject*>(lent_Value)) found = new_value(found.it, nullptr, 0);
      operand = new_handle(found.it, nullptr);
    } else if (kind == ABSENT) {
      Ref unless = attribute(recipe, s_unless);
      Ref flag = checked(PyObject_GetItem(unless.it, name));
      PyObject* constant = PyDict_GetItem(constants.it, flag.it);
      if (constant == nullptr || !PyObject_IsTrue(constant)) return Ref();
      continue;
    } else {
      if (static_cast<size_t>(place) >= node.num_outputs()) return Ref();
      const torch::autograd::Edge& edge = node.next_edge(place);
      if (!edge.is_valid() || (kind != LEAF && key_of(edge.input_nr) == nullptr)) return Ref();
      if (kind == EDGE) {
        Ref held = registered(*edge.function, edge.input_nr);
        if (!held) return Ref();
        operand = new_handle(held.it, nullptr);
      } else {
        Ref there = checked(torch::autograd::functionToPyObject(edge.function));
        if (kind == LEAF) {
          Ref leaf(PyObject_GetAttrString(there.it, "variable"));
          if (!leaf) {
            PyErr_Clear();
            return Ref();
          }
          Ref held = hold_leaf(relied_on_by(builder).it, leaf.it);
          operand = new_handle(held.it, nullptr);
        } else {
          PyObject* further = PyTuple_GET_ITEM(turn, 4);
          Ref its_table = attribute(further, s_table);
          const char* kind_of = PyUnicode_AsUTF8(PyTuple_GET_ITEM(its_table.it, KIND));
          if (edge.function->name() != kind_of || registered(*edge.function, edge.input_nr)) return Ref();
          Ref held = follow(further, its_table.it, builder, &there, edge.function, edge.input_nr, nullptr);
          if (!held) return Ref();
          operand = new_handle(held.it, nullptr);
        }
      }
    }
    PyObject* before = PyTuple_GET_ITEM(operands.it, n);
    PyTuple_SET_ITEM(operands.it, n, operand.release());
    Py_DECREF(before);
  }
  for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(numbers); ++n) {
    PyObject* name = PyTuple_GET_ITEM(numbers, n);
    Ref found = captured(node, name, sites);
    if (!found || !is_number(found.it)) return Ref();
    if (PyDict_SetItem(constants.it, name, found.it)) throw python_error();
  }
  if (column(LOOKS_UP) == Py_True) {
    Ref number = checked(PyLong_FromLongLong(output));
    Ref original = like == nullptr ? borrowed(Py_None) : checked(THPVariable_Wrap(*like));
    if (call(attribute(path, s_look_up).it, {builder, as_object(), number.it, original.it, constants.it}).it != Py_True) return Ref();
  }
  Ref stride = like == nullptr ? borrowed(Py_None) : strides_of(*like);
  Ref captured_sites = sites ? checked(PyFrozenSet_New(sites.it)) : borrowed(no_sites);
  Ref maker(reinterpret_cast<PyObject*>(fresh<Recompute>(lent_Recompute)));
  if (!maker) throw python_error();
  fill(reinterpret_cast<Recompute*>(maker.it), recipe, operands.it, column(PLACES), constants.it, stride.it, captured_sites.it,
       column(INTO) == Py_True);
  Ref value = new_value(nullptr, maker.it, output);
  reinterpret_cast<Value*>(value.it)->is_intermediate = like == nullptr;
  enter(node, output, value.it);
  return value;
}

// A handle on the value of `base`, seen as `wrapped` sees it
Ref handle_for(PyObject* wrapped, PyObject* value) {
  const at::Tensor& tensor = unwrapped(wrapped);
  if (!tensor.is_view()) return new_handle(value, nullptr);
  Ref size = attribute(wrapped, s_shape), stride = strides_of(tensor);
  Ref offset = checked(PyLong_FromLongLong(tensor.storage_offset()));
  Ref view = checked(PyTuple_Pack(3, size.it, stride.it, offset.it));
  return new_handle(value, view.it);
}

// `SavedTensorPacker.hold` of a value that an earlier slot recomputes; nothing where Python has to look more closely
Ref recomputed_earlier(PyObject* wrapped, Value* value, long long version) {
  bool is_recomputed = !is_none(value->maker) && Py_TYPE(value->maker) == reinterpret_cast<PyTypeObject*>(lent_Recompute);
  if (!is_recomputed || !is_none(value->places)) return Ref();
  bool is_certain = !is_none(reinterpret_cast<Recompute*>(value->maker)->stride);
  if (!is_certain || (value->version != version && value->version != -1)) return Ref();
  value->is_intermediate = 0;
  return handle_for(wrapped, reinterpret_cast<PyObject*>(value));
}

// `SavedTensorPacker.follow_path`, or a handle on the value that an earlier slot recomputes; nothing where Python has to look
// more closely
Ref recomputed(PyObject* packer, PyObject* wrapped, PyObject* decision) {
  at::Tensor base = whole(wrapped);
  if (!base.defined()) return Ref();
  NodePointer owner = base.grad_fn();
  long long output = static_cast<long long>(base.output_nr()), version = static_cast<long long>(base._version());
  if (!owner || key_of(output) == nullptr) return Ref();
  Ref kind = attribute(decision, s_node);
  if (owner->name() != PyUnicode_AsUTF8(kind.it)) return Ref();
  if (Ref value = registered(*owner, output)) return recomputed_earlier(wrapped, reinterpret_cast<Value*>(value.it), version);
  Ref path = attribute(decision, s_path);
  if (is_none(path.it) || output || base.storage_offset()) return Ref();
  Ref table = attribute(path.it, s_table);
  if (is_none(table.it)) return Ref();
  Ref versions = attribute(packer, s_versions), address = attribute(decision, s_address);
  PyObject* expected = PyDict_GetItem(versions.it, address.it);
  if (expected == nullptr || PyLong_AsLongLong(expected) != version) return Ref();
  Ref builder = attribute(packer, s_builder);
  Ref value = follow(path.it, table.it, builder.it, nullptr, owner, 0, &base);
  if (!value) return Ref();
  reinterpret_cast<Value*>(value.it)->version = version;
  return handle_for(wrapped, value.it);
}

// `SavedTensorPacker.keep` of tensors that have a node
Ref kept(PyObject* wrapped) {
  const at::Tensor& tensor = unwrapped(wrapped);
  at::Tensor base = whole(wrapped);
  if (!base.defined()) return Ref();
  NodePointer owner = base.grad_fn();
  long long output = static_cast<long long>(base.output_nr()), version = static_cast<long long>(base._version());
  if (!owner || key_of(output) == nullptr) return Ref();
  Ref value = registered(*owner, output);
  if (value && !is_none(reinterpret_cast<Value*>(value.it)->maker)) return Ref();
  if (!value || reinterpret_cast<Value*>(value.it)->version != version) {
    Ref detached = checked(THPVariable_Wrap(base.detach()));
    value = new_value(detached.it, nullptr, output);
    enter(*owner, output, value.it);
  }
  Ref view = tensor.is_view() ? checked(THPVariable_Wrap(tensor.detach())) : Ref();
  return new_handle(value.it, view.it);
}

// `kept`, for Python: None where it has to look more closely
PyObject* kept_in_common(PyObject*, PyObject* wrapped) {
  HANDLE_TH_ERRORS
  Ref handle = kept(wrapped);
  return handle ? handle.release() : Py_NewRef(Py_None);
  END_HANDLE_TH_ERRORS
}

// `ReplayFrame.left`
Ref left(PyObject* frame, PyObject* wrapped) {
  const at::Tensor& tensor = unwrapped(wrapped);
  if (!THPVariable_CheckExact(wrapped) || tensor.is_view()) return Ref();
  NodePointer owner = tensor.grad_fn();
  long long output = static_cast<long long>(tensor.output_nr()), version = static_cast<long long>(tensor._version());
  if (!owner || key_of(output) == nullptr) return Ref();
  Ref place = attribute(frame, s_count), value = registered(*owner, output);
  Ref next = checked(PyLong_FromLongLong(PyLong_AsLongLong(place.it) + 1));
  if (value) {
    Value* found = reinterpret_cast<Value*>(value.it);
    bool is_usable = (found->version == version || found->version == -1) && !found->is_intermediate && is_none(found->places);
    if (!is_usable || !(is_none(found->maker) || found->maker == frame)) return Ref();
  } else {
    value = new_value(nullptr, frame, output);
    reinterpret_cast<Value*>(value.it)->version = version;
    Ref reference = checked(PyWeakref_NewRef(value.it, nullptr));
    Ref values = attribute(frame, s_values), expected = attribute(frame, s__expected);
    Ref shape = attribute(wrapped, s_shape), dtype = attribute(wrapped, s_dtype);
    Ref layout = checked(PyTuple_Pack(3, shape.it, dtype.it, Py_None));
    if (PyDict_SetItem(values.it, place.it, reference.it) || PyDict_SetItem(metadata(*owner), key_of(output), reference.it) ||
        PyDict_SetItem(expected.it, place.it, layout.it))
      throw python_error();
  }
  if (PyObject_SetAttr(frame, s_count, next.it)) throw python_error();
  return new_handle(value.it, nullptr);
}

struct Pack {
  PyObject_HEAD PyObject *run, *in_python;
  vectorcallfunc vectorcall;
};

PyObject* pack_call(PyObject* callable, PyObject* const* arguments, size_t, PyObject*) {
  HANDLE_TH_ERRORS
  Pack* self = reinterpret_cast<Pack*>(callable);
  PyObject* tensor = arguments[0];
  Ref run = borrowed(PyWeakref_GetObject(self->run));
  if (run.it == Py_None) return call(self->in_python, {tensor}).release();
  Ref scope = attribute(run.it, s_scope), needed = attribute(scope.it, s_needed), frame = attribute(run.it, s_frame);
  if (needed.it == Py_None) return call(self->in_python, {tensor}).release();
  Ref ordinal = attribute(scope.it, s_ordinal);
  Ref handle;
  int is_needed = frame.it != Py_None || PySet_Contains(needed.it, ordinal.it);
  if (is_needed < 0) throw python_error();
  if (!is_needed) {
    const at::Tensor& saved = unwrapped(tensor);
    if (!THPVariable_CheckExact(tensor)) return call(self->in_python, {tensor}).release();
    handle = checked(PyTuple_New(2));
    bool is_parameter = saved.requires_grad() && !saved.grad_fn();
    PyTuple_SET_ITEM(handle.it, 0, is_parameter ? Py_NewRef(tensor) : checked(THPVariable_Wrap(saved.detach())).release());
    PyTuple_SET_ITEM(handle.it, 1, PyLong_FromLongLong(static_cast<long long>(saved._version())));
  } else {
    Ref observer = attribute(run.it, s_observer), learnt = attribute(scope.it, s_learnt), held = attribute(scope.it, s_held);
    if (!is_none(observer.it) || !is_none(learnt.it) || PyList_GET_SIZE(held.it))
      return call(self->in_python, {tensor}).release();
    Ref actions = attribute(scope.it, s_actions), decisions = attribute(actions.it, s_recompute);
    PyObject* decision = PyDict_GetItem(decisions.it, ordinal.it);
    if (decision == nullptr) {
      handle = frame.it == Py_None ? kept(tensor) : left(frame.it, tensor);
    } else if (frame.it == Py_None) {
      Ref packer = attribute(run.it, s_packer);
      try {
        handle = recomputed(packer.it, tensor, decision);
      } catch (python_error& error) {  // an operand that must not be read: Python looks for it, and says so
        error.restore();
        if (!PyErr_ExceptionMatches(PyExc_Exception)) throw;
        PyErr_Clear();
      }
    }
    if (!handle) return call(self->in_python, {tensor}).release();
  }
  Ref next = checked(PyLong_FromLongLong(PyLong_AsLongLong(ordinal.it) + 1));
  if (PyObject_SetAttr(scope.it, s_ordinal, next.it)) throw python_error();
  return handle.release();
  END_HANDLE_TH_ERRORS
}
int pack_init(Pack* self, PyObject* args, PyObject*) {
  PyObject *run, *in_python;
  if (!PyArg_ParseTuple(args, "OO", &run, &in_python)) return -1;
  set(self->run, Py_NewRef(run));
  set(self->in_python, Py_NewRef(in_python));
  self->vectorcall = pack_call;
  return 0;
}
int pack_traverse(Pack* self, visitproc visit, void* arg) {
  Py_VISIT(self->run);
  Py_VISIT(self->in_python);
  return 0;
}
int pack_clear(Pack* self) {
  Py_CLEAR(self->run);
  Py_CLEAR(self->in_python);
  return 0;
}
void pack_dealloc(Pack* self) {
  PyObject_GC_UnTrack(self);
  pack_clear(self);
  Py_TYPE(self)->tp_free(reinterpret_cast<PyObject*>(self));
}

// --- replays

long long number_in(PyObject* of, PyObject* name) { return PyLong_AsLongLong(attribute(of, name).it); }
void set_number(PyObject* of, PyObject* name, long long number) {
  if (PyObject_SetAttr(of, name, checked(PyLong_FromLongLong(number)).it)) throw python_error();
}

// `ReplayFrame.as_saved`
Ref as_saved(PyObject* frame, PyObject* place, PyObject* wrapped) {
  PyObject* expected = PyDict_GetItem(attribute(frame, s__expected).it, place);
  if (expected != nullptr && PyTuple_GET_ITEM(expected, 2) == Py_None && THPVariable_CheckExact(wrapped)) {
    Ref shape = attribute(wrapped, s_shape), dtype = attribute(wrapped, s_dtype);
    int is_same = PyObject_RichCompareBool(shape.it, PyTuple_GET_ITEM(expected, 0), Py_EQ);
    if (is_same < 0) throw python_error();
    if (is_same && dtype.it == PyTuple_GET_ITEM(expected, 1)) return checked(THPVariable_Wrap(unwrapped(wrapped).detach()));
  }
  return call(attribute(frame, s_as_saved).it, {place, wrapped});
}

// `ReplayRun.pack` of a tensor that is final when it is saved
PyObject* replay_pack_call(PyObject* callable, PyObject* const* arguments, size_t, PyObject*) {
  HANDLE_TH_ERRORS
  Pack* self = reinterpret_cast<Pack*>(callable);
  PyObject *run = self->run, *wrapped = arguments[0];
  const at::Tensor& tensor = unwrapped(wrapped);
  long long operation = static_cast<long long>(at::sequence_number::peek());
  long long place = number_in(run, s__place), last = number_in(run, s__last);
  bool is_new = operation != number_in(run, s__operator);
  bool is_final = tensor.is_view() || tensor.requires_grad();
  if (attribute(run, s__inside_another).it == Py_True || !is_final ||
      (is_new && (place >= last || PyObject_Size(attribute(run, s_fresh).it))))
    return call(self->in_python, {wrapped}).release();
  if (is_new) {
    set_number(run, s__operator, operation);
    if (PyObject_SetAttr(run, s__is_complete, Py_True)) throw python_error();
  }
  Ref number = checked(PyLong_FromLongLong(++place)), frame = attribute(run, s__frame);
  if (PyObject_SetAttr(run, s__place, number.it)) throw python_error();
  int is_wanted = PySet_Contains(attribute(run, s__wanted).it, number.it);
  if (is_wanted < 0) throw python_error();
  if (is_wanted) {
    Ref caught = as_saved(frame.it, number.it, wrapped);
    if (PySet_Add(attribute(run, s_handed_over).it, number.it)) throw python_error();
    call(attribute(run, s__at).it, {number.it, caught.it});
  }
  if (place >= last && attribute(run, s__is_complete).it == Py_True) {
    PyErr_SetNone(lent_StopReplay);
    return nullptr;  // not thrown here as well: torch throws it through its operator, which takes microseconds
  }
  if (attribute(run, s__holds).it != Py_True && is_none(attribute(frame.it, s_held).it)) Py_RETURN_NONE;
  return call(attribute(run, s_hold).it, {wrapped}).release();
  END_HANDLE_TH_ERRORS
}
int replay_pack_init(Pack* self, PyObject* args, PyObject* kwargs) {
  int failed = pack_init(self, args, kwargs);
  self->vectorcall = replay_pack_call;
  return failed;
}

// `_binds_in_python` of known_modules.py: True if the tables contain these objects under these names, in this order
PyObject* binds(PyObject*, PyObject* args) {
  PyObject *tables, *names, *values, *name, *value;
  if (!PyArg_ParseTuple(args, "O!O!O!", &PyList_Type, &tables, &PyList_Type, &names, &PyList_Type, &values)) return nullptr;
  Py_ssize_t at = 0, count = PyList_GET_SIZE(names);
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(tables); ++n) {
    PyObject* table = PyList_GET_ITEM(tables, n);
    for (Py_ssize_t entry = 0; PyDict_Next(table, &entry, &name, &value); ++at) {
      if (at >= count || value != PyList_GET_ITEM(values, at)) Py_RETURN_FALSE;
      PyObject* known = PyList_GET_ITEM(names, at);
      int is_same = name == known ? 1 : PyObject_RichCompareBool(name, known, Py_EQ);
      if (is_same < 0) return nullptr;
      if (!is_same) Py_RETURN_FALSE;
    }
  }
  return PyBool_FromLong(at == count);
}

// `_read_modes_in_python` of compute_modes.py
PyObject* modes(PyObject*, PyObject* kinds) {
  HANDLE_TH_ERRORS
  const at::Context& context = at::globalContext();
  auto flag = [](bool is_on) { return is_on ? Py_True : Py_False; };
  Ref kernels = checked(PyTuple_Pack(4, flag(context.userEnabledFlashSDP()), flag(context.userEnabledMemEfficientSDP()),
                                     flag(context.userEnabledMathSDP()), flag(context.userEnabledCuDNNSDP())));
  Ref found = list_of({kernels.it, flag(at::autocast::is_autocast_cache_enabled())});
  for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(kinds); ++n) {
    const char* kind = PyUnicode_AsUTF8(PyTuple_GET_ITEM(kinds, n));
    if (kind == nullptr) throw python_error();
    c10::DeviceType type = c10::Device(kind).type();
    PyObject* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(at::autocast::get_autocast_dtype(type)));
    if (PyList_Append(found.it, flag(at::autocast::is_autocast_enabled(type))) || PyList_Append(found.it, dtype))
      throw python_error();
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

// --- kernels before torch's: `Gate` of privateuse1.py. Its dispatch keys are OVERRIDE_KEY and GATED_KEY there

constexpr c10::DispatchKey OVERRIDE_KEY = c10::DispatchKey::TESTING_ONLY_GenericMode;
constexpr c10::DispatchKey GATED_KEY = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

struct PassLarge final : c10::OperatorKernel {
  std::shared_ptr<std::atomic<int64_t>> least;
  explicit PassLarge(std::shared_ptr<std::atomic<int64_t>> least) : least(std::move(least)) {}
  bool passes(const at::Tensor& tensor) const {
    return tensor.defined() && !tensor.is_nested() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
           tensor.numel() * static_cast<int64_t>(tensor.itemsize()) >= least->load(std::memory_order_relaxed);
  }
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    keys = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, GATED_KEY);
    bool is_large = passes(torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor());
    op.redispatchBoxed(is_large ? keys.add(GATED_KEY) : keys, stack);
  }
};

struct Gate {
  PyObject_HEAD std::shared_ptr<std::atomic<int64_t>>* least;
  c10::RegistrationHandleRAII* registered;
};
int gate_init(Gate* self, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  const char* name;
  long long least;
  if (!PyArg_ParseTuple(args, "sL", &name, &least)) return -1;
  self->least = new std::shared_ptr<std::atomic<int64_t>>(std::make_shared<std::atomic<int64_t>>(least));
  self->registered = new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerImpl(
      {name, ""}, OVERRIDE_KEY, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<PassLarge>(*self->least)),
      std::nullopt, nullptr, "lowtide"));
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}
void gate_dealloc(Gate* self) {
  delete self->registered;
  delete self->least;
  Py_TYPE(self)->tp_free(reinterpret_cast<PyObject*>(self));
}
PyObject* gate_least(Gate* self, void*) { return PyLong_FromLongLong((*self->least)->load()); }
int gate_set_least(Gate* self, PyObject* value, void*) {
  long long least = value == nullptr ? -1 : PyLong_AsLongLong(value);
  if (PyErr_Occurred()) return -1;
  (*self->least)->store(least);
  return 0;
}

// --- the module

#define OBJECT(T, name) {#name, T_OBJECT, offsetof(T, name), 0, nullptr}
#define NUMBER(T, name) {#name, T_LONGLONG, offsetof(T, name), 0, nullptr}
#define FLAG(T, name) {#name, T_BOOL, offsetof(T, name), 0, nullptr}
PyMemberDef value_members[] = {
    OBJECT(Value, tensor), OBJECT(Value, maker), OBJECT(Value, leaf), OBJECT(Value, original), OBJECT(Value, places),
    NUMBER(Value, version), NUMBER(Value, output), NUMBER(Value, readers), NUMBER(Value, reads), NUMBER(Value, last_backward),
    FLAG(Value, is_partial), FLAG(Value, is_intermediate), {nullptr}};
PyMemberDef handle_members[] = {
    OBJECT(Handle, value), OBJECT(Handle, view), NUMBER(Handle, last_backward), {nullptr}};
PyMemberDef recompute_members[] = {
    OBJECT(Recompute, recipe), OBJECT(Recompute, operands), OBJECT(Recompute, places), OBJECT(Recompute, constants),
    OBJECT(Recompute, stride), OBJECT(Recompute, captured_sites), OBJECT(Recompute, sharded), OBJECT(Recompute, over),
    FLAG(Recompute, has_passed), {nullptr}};
PyMethodDef handle_methods[] = {{"get", handle_get, METH_NOARGS, nullptr}, {nullptr}};
PyTypeObject value_type = {PyVarObject_HEAD_INIT(nullptr, 0)}, handle_type = {PyVarObject_HEAD_INIT(nullptr, 0)},
             recompute_type = {PyVarObject_HEAD_INIT(nullptr, 0)}, pack_type = {PyVarObject_HEAD_INIT(nullptr, 0)},
             replay_pack_type = {PyVarObject_HEAD_INIT(nullptr, 0)}, gate_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyGetSetDef gate_fields[] = {
    {"least", reinterpret_cast<getter>(gate_least), reinterpret_cast<setter>(gate_set_least), nullptr, nullptr}, {nullptr}};

template <class T>
bool ready(PyTypeObject& type, const char* name, initproc init, destructor dealloc, traverseproc traverse, inquiry clear, PyMemberDef* members) {
  type.tp_name = name;
  type.tp_basicsize = sizeof(T);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC;
  type.tp_new = PyType_GenericNew;
  type.tp_init = init;
  type.tp_dealloc = dealloc;
  type.tp_traverse = traverse;
  type.tp_clear = clear;
  type.tp_members = members;
  return PyType_Ready(&type) == 0;
}

// Takes the classes and functions of the Python path by name: the classes are built on those of this module.
PyObject* lend(PyObject*, PyObject* args, PyObject* kwargs) {
#define TAKE(name)                                                             \
  if (PyObject* it = PyDict_GetItemString(kwargs, #name)) set(lent_##name, Py_NewRef(it));
  if (kwargs != nullptr) {
    LENT(TAKE)
  }
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"unpack", unpack, METH_O, nullptr},
    {"binds", binds, METH_VARARGS, nullptr},
    {"modes", modes, METH_O, nullptr},
    {"kept", kept_in_common, METH_O, nullptr},
    {"lend", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(lend)), METH_VARARGS | METH_KEYWORDS, nullptr},
    {nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "lowtide_hot_path", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_lowtide_hot_path() {
#define INTERN(name) s_##name = PyUnicode_InternFromString(#name);
  NAMES(INTERN)
  no_sites = PyFrozenSet_New(nullptr);
  no_constants = PyDict_New();
  handle_type.tp_methods = handle_methods;
  for (PyTypeObject* type : {&pack_type, &replay_pack_type}) {
    type->tp_vectorcall_offset = offsetof(Pack, vectorcall);
    type->tp_call = PyVectorcall_Call;
  }
#define INQUIRY(f) reinterpret_cast<inquiry>(f)
#define READY(T, type, name, prefix, members)                                                             \
  ready<T>(type, name, reinterpret_cast<initproc>(prefix##_init), reinterpret_cast<destructor>(prefix##_dealloc), \
           reinterpret_cast<traverseproc>(prefix##_traverse), INQUIRY(prefix##_clear), members)
  if (!READY(Value, value_type, "lowtide_hot_path.ValueFields", value, value_members) ||
      !READY(Handle, handle_type, "lowtide_hot_path.HandleFields", handle, handle_members) ||
      !READY(Recompute, recompute_type, "lowtide_hot_path.RecomputeFields", recompute, recompute_members) ||
      !READY(Pack, pack_type, "lowtide_hot_path.Pack", pack, nullptr) ||
      !ready<Pack>(replay_pack_type, "lowtide_hot_path.ReplayPack", reinterpret_cast<initproc>(replay_pack_init),
                   reinterpret_cast<destructor>(pack_dealloc), reinterpret_cast<traverseproc>(pack_traverse),
                   INQUIRY(pack_clear), nullptr))
    return nullptr;
  for (PyTypeObject* type : {&pack_type, &replay_pack_type}) {
    type->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
    // as `hidden_from_checkpoints` marks the hooks in Python
    PyDict_SetItemString(type->tp_dict, "_checkpoint_internal", Py_True);
    PyDict_SetItemString(type->tp_dict, "_user_hooks", Py_None);
  }
  gate_type.tp_name = "lowtide_hot_path.Gate";
  gate_type.tp_basicsize = sizeof(Gate);
  gate_type.tp_flags = Py_TPFLAGS_DEFAULT;
  gate_type.tp_new = PyType_GenericNew;
  gate_type.tp_init = reinterpret_cast<initproc>(gate_init);
  gate_type.tp_dealloc = reinterpret_cast<destructor>(gate_dealloc);
  gate_type.tp_getset = gate_fields;
  if (PyType_Ready(&gate_type)) return nullptr;
  PyObject* made = PyModule_Create(&module);
  if (made == nullptr) return nullptr;
  PyModule_AddObjectRef(made, "ValueFields", reinterpret_cast<PyObject*>(&value_type));
  PyModule_AddObjectRef(made, "HandleFields", reinterpret_cast<PyObject*>(&handle_type));
  PyModule_AddObjectRef(made, "RecomputeFields", reinterpret_cast<PyObject*>(&recompute_type));
  PyModule_AddObjectRef(made, "Pack", reinterpret_cast<PyObject*>(&pack_type));
  PyModule_AddObjectRef(made, "ReplayPack", reinterpret_cast<PyObject*>(&replay_pack_type));
  PyModule_AddObjectRef(made, "Gate", reinterpret_cast<PyObject*>(&gate_type));
  return made;
}
