// Index arithmetic of the Megatron-LM sample order that NumPy can only do slowly, or with more memory.
//
// `build_sample_index` walks over documents: sample i takes tokens [i*S, i*S + S + extra) of the concatenated documents,
// so sample i + 1 starts `extra` tokens before sample i ends. `greedy` gives each position of a blend to the member
// that lags furthest behind its weight. megatron_lite/data has both in NumPy, with identical results, for
// environments without a compiler. Everything is int64: a corpus may have more than 2^31 tokens.
//
// The files of this module are a plain Python extension (pybind11, whose headers come with torch); it needs no torch when it runs.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

// Where the samples begin: int64 [num_samples + 1, 2], pairs (index into doc_idx, token offset in that document).
py::array_t<int64_t> build_sample_index(const Array<int32_t>& sizes, const Array<int64_t>& doc_idx, int64_t seq_length,
                                        int64_t num_samples, int64_t extra) {
  if (seq_length < 1 || num_samples < 0 || extra < 0 || extra > 1) {
    throw py::value_error("seq_length must be >= 1, num_samples >= 0 and extra 0 or 1");
  }
  py::array_t<int64_t> result({num_samples + 1, int64_t(2)});
  const int32_t* size = sizes.data();
  const int64_t* document = doc_idx.data();
  const int64_t documents = doc_idx.size(), known = sizes.size();
  int64_t* out = result.mutable_data();
  bool short_of_tokens = false;
  int64_t wrong = -1;
  {
    py::gil_scoped_release release;
    for (int64_t i = 0; i < documents && wrong < 0; ++i) {
      if (document[i] < 0 || document[i] >= known) wrong = i;
    }
    int64_t position = 0, begin = 0;  // of the document that holds the token; begin is the token its text starts at
    out[0] = out[1] = 0;
    for (int64_t i = 1; i <= num_samples && wrong < 0; ++i) {
      const int64_t last = i * seq_length + extra - 1;  // the last token of sample i - 1
      while (position < documents && last >= begin + size[document[position]]) begin += size[document[position++]];
      if (position == documents) {
        short_of_tokens = true;
        break;
      }
      out[2 * i] = position;
      out[2 * i + 1] = last - begin + 1 - extra;
    }
  }
  if (wrong >= 0) throw py::value_error("doc_idx[" + std::to_string(wrong) + "] is not a document");
  if (short_of_tokens) throw py::value_error("the documents hold too few tokens for num_samples");
  return result;
}

// Positions [first, first + length) of a blend, given how often each member was taken before: int64 [length].
py::array_t<int64_t> greedy(const Array<double>& weights, int64_t length, int64_t first, const Array<int64_t>& counts,
                            const std::optional<Array<int64_t>>& quotas) {
  const int64_t members = weights.size();
  if (length < 0 || members < 1 || counts.size() != members || (quotas && quotas->size() != members)) {
    throw py::value_error("length must be >= 0, and there must be a weight, a count and a quota for each member");
  }
  py::array_t<int64_t> result(length);
  int64_t* out = result.mutable_data();
  const double* weight = weights.data();
  const int64_t* quota = quotas ? quotas->data() : nullptr;
  std::vector<int64_t> count(counts.data(), counts.data() + members);
  bool all_full = false;
  {
    py::gil_scoped_release release;
    for (int64_t i = 0; i < length && !all_full; ++i) {
      const double position = double(std::max<int64_t>(first + i, 1));
      int64_t best = -1;
      double most = -std::numeric_limits<double>::infinity();
      for (int64_t d = 0; d < members; ++d) {
        const double lag = weight[d] * position - double(count[d]);
        if (lag > most && !(quota && count[d] >= quota[d])) {  // ties stay with the lower member
          most = lag;
          best = d;
        }
      }
      all_full = best < 0;
      if (!all_full) ++count[out[i] = best];
    }
  }
  if (all_full) throw py::value_error("the quotas are less than the positions");
  return result;
}

}  // namespace

void add_text_measures(py::module_& m);  // text_measures.cpp
void add_minhash(py::module_& m);        // minhash.cpp
void add_windows(py::module_& m);        // windows.cpp
void add_segments(py::module_& m);       // segments.cpp

PYBIND11_MODULE(_index, m) {
  m.def("build_sample_index", &build_sample_index, py::arg("sizes"), py::arg("doc_idx"), py::arg("seq_length"),
        py::arg("num_samples"), py::arg("extra"));
  m.def("greedy", &greedy, py::arg("weights"), py::arg("length"), py::arg("first"), py::arg("counts"), py::arg("quotas"));
  add_text_measures(m);
  add_minhash(m);
  add_windows(m);
  add_segments(m);
}
