// The shingles of a text and their MinHash signature, in one pass over the text, and the size of an intersection.
//
// megatron_lite/clean/shingles.py has the same in NumPy, with identical results, and says what is computed and why.
//
// The signature takes most of the time: one multiplication, addition and minimum for each shingle and permutation. It
// is written with vectors of 16 numbers, which the compiler lowers to what the target has, and compiled for several
// targets where the compiler and the loader can choose among them; all of it is integer arithmetic, so all agree.
//
// Linked into the module of data_index.cpp.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_SEVERAL_TARGETS __attribute__((target_clones("arch=x86-64-v4", "avx2", "sse4.1", "default")))
#else
#define FOR_SEVERAL_TARGETS
#endif

namespace py = pybind11;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

constexpr int kLanes = 16;
typedef uint32_t Lanes __attribute__((vector_size(4 * kLanes)));
constexpr uint64_t kCharacter = 0x9e3779b97f4a7c15ull;  // powers of it weigh the characters of a token
constexpr uint64_t kToken = 0xd1342543de82ef95ull;      // and of it the tokens of a shingle
enum Class : uint8_t { kSeparator = 0, kWord = 1, kAlone = 2 };

inline uint64_t mix(uint64_t x) {  // splitmix64's finalizer
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// out[i] = min over x of (a[i] x + b[i]) mod 2^32; the arrays hold whole vectors.
FOR_SEVERAL_TARGETS
void minima(const uint32_t* x, size_t count, const uint32_t* a, const uint32_t* b, size_t permutations, uint32_t* out) {
  for (size_t p = 0; p < permutations; p += 2 * kLanes) {  // two vectors hide each other's latency
    Lanes a0, a1, b0, b1, least0, least1;
    std::memcpy(&a0, a + p, sizeof a0);
    std::memcpy(&a1, a + p + kLanes, sizeof a1);
    std::memcpy(&b0, b + p, sizeof b0);
    std::memcpy(&b1, b + p + kLanes, sizeof b1);
    least0 = least1 = ~Lanes{};
    for (size_t i = 0; i < count; ++i) {
      const Lanes v0 = a0 * x[i] + b0, v1 = a1 * x[i] + b1;
      least0 = v0 < least0 ? v0 : least0;
      least1 = v1 < least1 ? v1 : least1;
    }
    std::memcpy(out + p, &least0, sizeof least0);
    std::memcpy(out + p + kLanes, &least1, sizeof least1);
  }
}

class MinHasher {
 public:
  MinHasher(const Array<uint8_t>& classes, int64_t ngram, const Array<uint32_t>& a, const Array<uint32_t>& b)
      : ngram_(size_t(ngram)), permutations_(size_t(a.size())), classes_(classes.data(), classes.data() + classes.size()) {
    if (ngram < 1 || a.size() < 1 || a.size() != b.size()) throw py::value_error("ngram and permutations must be at least 1");
    const size_t padded = (permutations_ + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
    a_.assign(a.data(), a.data() + a.size());
    b_.assign(b.data(), b.data() + b.size());
    a_.resize(padded);
    b_.resize(padded);
    for (size_t i = 1; i < ngram_; ++i) highest_ *= kToken;
  }

  // (signature uint32 [permutations], shingles uint32 [n], sorted, each once).
  py::tuple hash(const py::str& text) {
    PyObject* object = text.ptr();
    const size_t length = size_t(PyUnicode_GET_LENGTH(object));
    tokens_.clear();
    switch (PyUnicode_KIND(object)) {
      case PyUnicode_1BYTE_KIND: split(PyUnicode_1BYTE_DATA(object), length); break;
      case PyUnicode_2BYTE_KIND: split(PyUnicode_2BYTE_DATA(object), length); break;
      default: split(PyUnicode_4BYTE_DATA(object), length);
    }
    shingle();
    sort();
    shingles_.erase(std::unique(shingles_.begin(), shingles_.end()), shingles_.end());
    std::vector<uint32_t> signature(a_.size());
    minima(shingles_.data(), shingles_.size(), a_.data(), b_.data(), a_.size(), signature.data());
    return py::make_tuple(py::array_t<uint32_t>(py::ssize_t(permutations_), signature.data()),
                          py::array_t<uint32_t>(py::ssize_t(shingles_.size()), shingles_.data()));
  }

 private:
  template <class Code>
  void split(const Code* text, size_t length) {
    uint64_t sum = 0, weight = 1;
    bool inside = false;
    for (size_t i = 0; i < length; ++i) {
      const uint64_t code = text[i];
      const uint8_t kind = code < classes_.size() ? classes_[code] : uint8_t(kSeparator);
      if (inside && kind != kWord) {
        tokens_.push_back(mix(sum));
        inside = false;
      }
      if (kind == kAlone) tokens_.push_back(mix(code + 1));
      if (kind != kWord) continue;
      if (!inside) sum = 0, weight = 1, inside = true;
      sum += (code + 1) * weight;
      weight *= kCharacter;
    }
    if (inside) tokens_.push_back(mix(sum));
  }

  void shingle() {
    shingles_.clear();
    uint64_t sum = 0;
    const size_t count = tokens_.size();
    for (size_t i = 0; i < count; ++i) {
      if (i >= ngram_) sum -= tokens_[i - ngram_] * highest_;
      sum = sum * kToken + tokens_[i];
      if (i + 1 >= ngram_ || i + 1 == count) shingles_.push_back(uint32_t(mix(sum) >> 32));
    }
  }

  // Hashes are uniform: one pass by their leading bits leaves about one in each place, and insertion does the rest.
  void sort() {
    const size_t count = shingles_.size();
    int bits = 1;
    while (bits < 24 && (size_t(1) << bits) < count) ++bits;
    const int shift = 32 - bits;
    begins_.assign((size_t(1) << bits) + 1, 0);
    for (const uint32_t x : shingles_) ++begins_[(x >> shift) + 1];
    for (size_t i = 1; i < begins_.size(); ++i) begins_[i] += begins_[i - 1];
    sorted_.resize(count);
    for (const uint32_t x : shingles_) sorted_[begins_[x >> shift]++] = x;
    for (size_t i = 1; i < count; ++i) {
      const uint32_t x = sorted_[i];
      size_t at = i;
      for (; at > 0 && sorted_[at - 1] > x; --at) sorted_[at] = sorted_[at - 1];
      sorted_[at] = x;
    }
    shingles_.swap(sorted_);
  }

  size_t ngram_, permutations_;
  uint64_t highest_ = 1;  // weight of a shingle's first token
  std::vector<uint8_t> classes_;
  std::vector<uint32_t> a_, b_, shingles_, sorted_, begins_;
  std::vector<uint64_t> tokens_;
};

// How many numbers two sorted arrays share.
int64_t shared(const Array<uint32_t>& left, const Array<uint32_t>& right) {
  const uint32_t *a = left.data(), *b = right.data();
  const uint32_t *a_end = a + left.size(), *b_end = b + right.size();
  int64_t found = 0;
  while (a != a_end && b != b_end) {  // no branch depends on the numbers, which are random
    const uint32_t x = *a, y = *b;
    found += x == y;
    a += x <= y;
    b += y <= x;
  }
  return found;
}

}  // namespace

void add_minhash(py::module_& m) {
  py::class_<MinHasher>(m, "MinHasher")
      .def(py::init<const Array<uint8_t>&, int64_t, const Array<uint32_t>&, const Array<uint32_t>&>(), py::arg("classes"),
           py::arg("ngram"), py::arg("a"), py::arg("b"))
      .def("hash", &MinHasher::hash, py::arg("text"));
  m.def("shared", &shared, py::arg("left"), py::arg("right"));
}
