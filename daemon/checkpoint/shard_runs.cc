#include "daemon/checkpoint/shard_runs.h"

#include <algorithm>
#include <array>
#include <set>

#include "daemon/base/check.h"
#include "proto/tensor.h"

namespace mlpo {
namespace {

constexpr size_t kMaxDims = MLPO_MAX_DIMS;

// Coordinates of the whole tensor: [first, end) in each dimension.
struct Box {
  std::array<uint64_t, kMaxDims> first{};
  std::array<uint64_t, kMaxDims> end{};
};

// Where an element is in a shard's own order: the sum of coordinate times stride, less `base`; in arithmetic modulo
// 2^64, whose result is right because it is inside the shard.
struct Layout {
  std::array<uint64_t, kMaxDims> strides{};
  uint64_t base = 0;
  uint64_t At(const std::array<uint64_t, kMaxDims>& coordinates, size_t dims) const {
    uint64_t place = 0;
    for (size_t d = 0; d < dims; ++d) place += coordinates[d] * strides[d];
    return place - base;
  }
};

std::array<uint64_t, kMaxDims> RowMajorStrides(const std::vector<uint64_t>& shape) {
  std::array<uint64_t, kMaxDims> strides{};
  uint64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= shape[d];
  }
  return strides;
}

Layout LayoutOf(const TensorShard& shard) {
  Layout layout;
  if (shard.flat) {
    layout.strides = RowMajorStrides(shard.global_shape);
    layout.base = shard.flat_first;
    return layout;
  }
  layout.strides = RowMajorStrides(shard.shape);
  for (size_t d = 0; d < shard.offsets.size(); ++d) layout.base += shard.offsets[d] * layout.strides[d];
  return layout;
}

// The row-major elements [first, end) of `shape` as boxes in ascending order, moved by `offsets` (nullptr: not).
void Decompose(const std::vector<uint64_t>& shape, const std::vector<uint64_t>* offsets, uint64_t first, uint64_t end,
               std::vector<Box>* boxes) {
  const std::array<uint64_t, kMaxDims> inner = RowMajorStrides(shape);  // elements behind one step in a dimension
  while (first < end) {
    // The outermost dimension in which a whole step begins here and ends before `end`.
    size_t d = 0;
    while (first % inner[d] != 0 || end - first < inner[d]) ++d;  // the last one has inner 1
    Box box;
    uint64_t rest = first;
    for (size_t i = 0; i < shape.size(); ++i) {
      const uint64_t at = rest / inner[i];
      rest %= inner[i];
      box.first[i] = at;
      box.end[i] = i < d ? at + 1 : i > d ? shape[i] : at + std::min(shape[d] - at, (end - first) / inner[d]);
    }
    first += (box.end[d] - box.first[d]) * inner[d];
    if (offsets != nullptr) {
      for (size_t i = 0; i < shape.size(); ++i) {
        box.first[i] += (*offsets)[i];
        box.end[i] += (*offsets)[i];
      }
    }
    boxes->push_back(box);
  }
}

// Elements [first, end) of the shard's own order.
std::vector<Box> BoxesOf(const TensorShard& shard, uint64_t first, uint64_t end) {
  std::vector<Box> boxes;
  if (shard.flat) {
    Decompose(shard.global_shape, nullptr, shard.flat_first + first, shard.flat_first + end, &boxes);
  } else {
    Decompose(shard.shape, &shard.offsets, first, end, &boxes);
  }
  return boxes;
}

// Whether they have elements in common; *common has them then.
bool Intersect(const Box& a, const Box& b, size_t dims, Box* common) {
  for (size_t d = 0; d < dims; ++d) {
    common->first[d] = std::max(a.first[d], b.first[d]);
    common->end[d] = std::min(a.end[d], b.end[d]);
    if (common->first[d] >= common->end[d]) return false;
  }
  return true;
}

void VisitRows(const Box& box, size_t dims, const Layout& to, const Layout& from,
               const std::function<void(const Run&)>& visit) {
  // The inner dimensions, of which all elements follow each other in both.
  size_t outer = dims;
  uint64_t run = 1;
  while (outer > 0) {
    const size_t d = outer - 1;
    const uint64_t size = box.end[d] - box.first[d];
    if (size > 1 && (to.strides[d] != run || from.strides[d] != run)) break;
    run *= size;
    --outer;
  }
  std::array<uint64_t, kMaxDims> at = box.first;
  while (true) {
    visit({to.At(at, dims), from.At(at, dims), run});
    size_t d = outer;
    while (d > 0) {
      if (++at[d - 1] < box.end[d - 1]) break;
      at[d - 1] = box.first[d - 1];
      --d;
    }
    if (d == 0) return;
  }
}

}  // namespace

std::string ShapeText(const std::vector<uint64_t>& shape) {
  std::string text = "[";
  for (size_t d = 0; d < shape.size(); ++d) text += (d > 0 ? ", " : "") + std::to_string(shape[d]);
  return text + "]";
}

Status CheckShard(const TensorShard& shard, const std::string& who) {
  const size_t dims = shard.global_shape.size();
  if (dims == 0 || dims > kMaxDims) {
    return Status::Invalid(who + " has " + std::to_string(dims) + " dimensions; 1 to " + std::to_string(kMaxDims) +
                           " are known");
  }
  uint64_t global = 1, product = 1;
  bool empty = false;
  for (const uint64_t size : shard.global_shape) empty |= size == 0;
  for (const uint64_t size : shard.global_shape) {
    // The product without the zeros, so that no order of dimensions hides an overflow of strides.
    if (size != 0 && __builtin_mul_overflow(global, size, &global))
      return Status::Invalid(who + ": its global shape " + ShapeText(shard.global_shape) + " overflows 64 bits");
  }
  if (empty) global = 0;
  if (shard.flat) {
    if (!shard.shape.empty() || !shard.offsets.empty())
      return Status::Invalid(who + " is a range of elements and a box at once");
    if (shard.flat_first > global || shard.count > global - shard.flat_first)
      return Status::Invalid(who + ": its range reaches past its global shape " + ShapeText(shard.global_shape));
    return Status();
  }
  if (shard.shape.size() != dims || shard.offsets.size() != dims)
    return Status::Invalid(who + ": shape, global shape and offsets have different numbers of dimensions");
  for (size_t d = 0; d < dims; ++d) {
    const uint64_t whole = shard.global_shape[d];
    if (shard.offsets[d] > whole || shard.shape[d] > whole - shard.offsets[d])
      return Status::Invalid(who + ": dimension " + std::to_string(d) + " reaches past its global shape " +
                             ShapeText(shard.global_shape));
    product *= shard.shape[d];  // at most the global shape's, whatever its zeros
  }
  if (product != shard.count)
    return Status::Invalid(who + " has " + std::to_string(shard.count) + " elements, but its shape has " +
                           std::to_string(product));
  return Status();
}

std::string ShardText(const TensorShard& shard) {
  const std::string of = " of " + ShapeText(shard.global_shape);
  if (shard.flat) {
    return "elements " + std::to_string(shard.flat_first) + " to " + std::to_string(shard.flat_first + shard.count) +
           of;
  }
  std::string text = "[";
  for (size_t d = 0; d < shard.shape.size(); ++d) {
    text += (d > 0 ? ", " : "") + std::to_string(shard.offsets[d]) + ":" +
            std::to_string(shard.offsets[d] + shard.shape[d]);
  }
  return text + ")" + of;
}

void ForEachRun(const TensorShard& to, uint64_t first, uint64_t end, const TensorShard& from,
                const std::function<void(const Run&)>& visit) {
  MLPO_CHECK(to.global_shape == from.global_shape && first <= end && end <= to.count);
  if (first == end || from.count == 0) return;
  if (to == from) return visit({first, first, end - first});
  const size_t dims = to.global_shape.size();
  const Layout to_layout = LayoutOf(to), from_layout = LayoutOf(from);
  const std::vector<Box> from_boxes = BoxesOf(from, 0, from.count);
  Run last;  // the next one may go on where it ends: a range is several boxes
  const auto add = [&](const Run& run) {
    if (run.to == last.to + last.count && run.from == last.from + last.count && last.count > 0) {
      last.count += run.count;
      return;
    }
    if (last.count > 0) visit(last);
    last = run;
  };
  for (const Box& box : BoxesOf(to, first, end)) {
    for (const Box& other : from_boxes) {
      Box common;
      if (Intersect(box, other, dims, &common)) VisitRows(common, dims, to_layout, from_layout, add);
    }
  }
  if (last.count > 0) visit(last);
}

uint64_t CommonElements(const TensorShard& a, const TensorShard& b) {
  MLPO_CHECK(a.global_shape == b.global_shape);
  const size_t dims = a.global_shape.size();
  const std::vector<Box> boxes = BoxesOf(b, 0, b.count);
  uint64_t elements = 0;
  for (const Box& box : BoxesOf(a, 0, a.count)) {
    for (const Box& other : boxes) {
      Box common;
      if (!Intersect(box, other, dims, &common)) continue;
      uint64_t volume = 1;
      for (size_t d = 0; d < dims; ++d) volume *= common.end[d] - common.first[d];
      elements += volume;
    }
  }
  return elements;
}

Status CheckTiling(const std::vector<const TensorShard*>& shards, const std::string& who) {
  if (shards.empty()) return Status::Invalid(who + " is held by no rank");
  std::vector<const TensorShard*> distinct;  // without copies and without those that hold nothing
  std::set<const TensorShard*, ByShard> seen;
  for (const TensorShard* shard : shards) {
    if (shard->count > 0 && seen.insert(shard).second) distinct.push_back(shard);
  }
  const std::vector<uint64_t>& global_shape = shards.front()->global_shape;
  const size_t dims = global_shape.size();
  struct Place {
    Box box;
    const TensorShard* shard;
  };
  std::vector<Place> places;
  uint64_t held = 0;
  for (const TensorShard* shard : distinct) {
    for (const Box& box : BoxesOf(*shard, 0, shard->count)) places.push_back({box, shard});
    held += shard->count;
  }
  // Along the first dimension: a box meets only those that have not ended when it begins.
  std::sort(places.begin(), places.end(),
            [](const Place& a, const Place& b) { return a.box.first[0] < b.box.first[0]; });
  std::vector<const Place*> open;
  for (const Place& place : places) {
    std::erase_if(open, [&](const Place* other) { return other->box.end[0] <= place.box.first[0]; });
    for (const Place* other : open) {
      Box common;
      if (other->shard == place.shard || !Intersect(place.box, other->box, dims, &common)) continue;
      return Status::Invalid(who + " is held twice in part: " + ShardText(*other->shard) + " and " +
                             ShardText(*place.shard) + " overlap and are not copies of each other");
    }
    open.push_back(&place);
  }
  uint64_t global = 1;
  for (const uint64_t size : global_shape) global *= size;
  if (held != global) {
    return Status::Invalid(who + " of " + ShapeText(global_shape) + " has " + std::to_string(global) +
                           " elements, of which the parts hold " + std::to_string(held));
  }
  return Status();
}

}  // namespace mlpo
