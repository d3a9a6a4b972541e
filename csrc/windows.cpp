// The parts of a row of the windows order that cost most in Python: the keyed permutation of one index, and the search
// for the documents that begin in a range of the stream.
//
// megatron_lite/data/permutation.py and indexed.py have the same, with identical results, and say what is computed. All
// of it is integer arithmetic. The arrays of an index are not aligned in memory, so numbers are copied out one by one; a
// search reads about twenty of each array.
//
// Linked into the module of data_index.cpp.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

// ((value * bound) >> 64) for a 64-bit hash, and the hash of a round.
inline uint64_t below(uint64_t value, uint64_t bound) {
  return uint64_t((static_cast<unsigned __int128>(value) * bound) >> 64);
}

inline uint64_t mix(uint64_t value, uint64_t key) {
  uint64_t h = (value ^ key) * 0xD2E7470EE14C6C93ull;
  h ^= h >> 32;
  h *= 0xCA5A826395121157ull;
  return h ^ (h >> 29);
}

// A bijection of [0, n): rounds of a Feistel network over (x % a, x / a), repeated while the result is n or more.
class Permutation {
 public:
  Permutation(uint64_t n, uint64_t a, uint64_t b, std::vector<std::pair<uint64_t, uint64_t>> keys)
      : n_(n), a_(a), b_(b), keys_(std::move(keys)) {
    if (n < 1 || a < 1 || b < 1 || n > (uint64_t(1) << 62)) {
      throw py::value_error("n, a and b must be at least 1, n at most 2^62");
    }
  }

  uint64_t at(uint64_t index) const {
    if (index >= n_) throw py::index_error("outside the permutation");
    do {
      uint64_t left = index % a_, right = index / a_;
      for (const auto& [even, odd] : keys_) {
        left = (left + below(mix(right, even), a_)) % a_;
        right = (right + below(mix(left, odd), b_)) % b_;
      }
      index = left + a_ * right;
    } while (index >= n_);
    return index;
  }

 private:
  uint64_t n_, a_, b_;
  std::vector<std::pair<uint64_t, uint64_t>> keys_;
};

// An ascending int64 array at any address, little-endian as the machine is.
struct Ascending {
  const char* at = nullptr;
  int64_t size = 0;

  int64_t operator[](int64_t i) const {
    int64_t value;
    std::memcpy(&value, at + 8 * i, sizeof value);
    return value;
  }

  // The first place in [first, size) whose number is not below `value`.
  int64_t lower_bound(int64_t value, int64_t first) const {
    int64_t low = first, high = size;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if ((*this)[middle] < value) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// The document borders of an index.
class Borders {
 public:
  Borders(py::buffer index, int64_t pointers_at, int64_t sequences, int64_t borders_at, int64_t borders, int64_t item)
      : held_(index.request()), item_(item) {
    const int64_t bytes = held_.size * held_.itemsize;
    const auto inside = [&](int64_t at, int64_t count) {
      return at >= 0 && at <= bytes && count >= 0 && count <= (bytes - at) / 8;
    };
    if (item < 1 || !inside(pointers_at, sequences) || !inside(borders_at, borders)) {
      throw py::value_error("the arrays do not lie inside the index");
    }
    const char* base = static_cast<const char*>(held_.ptr);
    pointers_ = {base + pointers_at, sequences};
    documents_ = {base + borders_at, borders};
  }

  // Positions p with start <= p < stop at which a document that is not empty starts: int64, ascending.
  py::array_t<int64_t> starts(int64_t start, int64_t stop) const {
    const int64_t first = pointers_.lower_bound(start * item_, 0);
    const int64_t last = pointers_.lower_bound(stop * item_, first);
    const int64_t begin = first == last ? 0 : documents_.lower_bound(first, 0);
    const int64_t end = first == last ? 0 : documents_.lower_bound(last, begin);
    std::vector<int64_t> found;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t sequence = documents_[i];
      if (sequence < 0 || sequence >= pointers_.size) throw py::value_error("a document border is no sequence");
      const int64_t position = pointers_[sequence] / item_;
      if (found.empty() || found.back() != position) found.push_back(position);
    }
    py::array_t<int64_t> result(static_cast<py::ssize_t>(found.size()));
    if (!found.empty()) std::memcpy(result.mutable_data(), found.data(), found.size() * sizeof(int64_t));
    return result;
  }

 private:
  py::buffer_info held_;  // keeps the map from being closed
  int64_t item_;
  Ascending pointers_, documents_;
};

}  // namespace

void add_windows(py::module_& m) {
  py::class_<Permutation>(m, "Permutation")
      .def(py::init<uint64_t, uint64_t, uint64_t, std::vector<std::pair<uint64_t, uint64_t>>>())
      .def("__call__", &Permutation::at);
  py::class_<Borders>(m, "Borders")
      .def(py::init<py::buffer, int64_t, int64_t, int64_t, int64_t, int64_t>(), py::arg("index"), py::arg("pointers_at"),
           py::arg("sequences"), py::arg("borders_at"), py::arg("borders"), py::arg("item"))
      .def("starts", &Borders::starts);
}
