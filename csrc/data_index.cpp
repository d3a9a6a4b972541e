// Index arithmetic of the Megatron-LM sample order that NumPy can only do slowly, or with more memory.
//
// `build_sample_index` walks over documents: sample i takes tokens [i*S, i*S + S + extra) of the concatenated documents,
// so sample i + 1 starts `extra` tokens before sample i ends. `blend_indices` gives each position of a blend to the
// dataset that lags furthest behind its weight. megatron_lite/data has both in NumPy, with identical results, for
// environments without a compiler. Everything is int64: a corpus may have more than 2^31 tokens.
//
// The files of this module are a plain Python extension (pybind11, whose headers come with torch); it needs no torch when it runs.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
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

template <class Index>
py::tuple blend(const double* weight, int64_t datasets, int64_t size) {
  py::array_t<Index> dataset_index(size);
  py::array_t<int64_t> sample_index(size);
  Index* which = dataset_index.mutable_data();
  int64_t* sample = sample_index.mutable_data();
  {
    py::gil_scoped_release release;
    std::vector<int64_t> count(datasets, 0);
    for (int64_t i = 0; i < size; ++i) {
      const double position = i > 1 ? double(i) : 1.0;
      int64_t best = 0;
      double most = -std::numeric_limits<double>::infinity();
      for (int64_t d = 0; d < datasets; ++d) {
        const double lag = weight[d] * position - double(count[d]);
        if (lag > most) {  // ties stay with the lower dataset
          most = lag;
          best = d;
        }
      }
      which[i] = Index(best);
      sample[i] = count[best]++;
    }
  }
  return py::make_tuple(dataset_index, sample_index);
}

// (dataset_index int16 [size] (int32 for more than 32,767 datasets), sample_index int64 [size]).
py::tuple blend_indices(const Array<double>& weights, int64_t size) {
  if (size < 0 || weights.size() < 1) throw py::value_error("size must be >= 0, and there must be a weight");
  const int64_t datasets = weights.size();
  return datasets <= 32767 ? blend<int16_t>(weights.data(), datasets, size)
                           : blend<int32_t>(weights.data(), datasets, size);
}

}  // namespace

void add_text_measures(py::module_& m);  // text_measures.cpp
void add_minhash(py::module_& m);        // minhash.cpp
void add_windows(py::module_& m);        // windows.cpp

PYBIND11_MODULE(_index, m) {
  m.def("build_sample_index", &build_sample_index, py::arg("sizes"), py::arg("doc_idx"), py::arg("seq_length"),
        py::arg("num_samples"), py::arg("extra"));
  m.def("blend_indices", &blend_indices, py::arg("weights"), py::arg("size"));
  add_text_measures(m);
  add_minhash(m);
  add_windows(m);
}
