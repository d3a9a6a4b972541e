// What the quality rules of the cleaning pipeline count in a text, in one pass and at the speed of memory.
//
// megatron_lite/clean/quality_measures.py has the same in Python and says what each number means; a test compares them.
// Characters are classified by a table that Python makes, so both know the same Unicode. Lines, paragraphs and n-grams are
// compared by 64-bit hashes: two different ones among the million of a long text are taken for equal once in 10^7 texts.
//
// Linked into the module of data_index.cpp.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

namespace py = pybind11;

namespace {

enum Class : uint8_t { kSymbol = 0, kSpace = 1, kLetter = 2, kDigit = 3, kMark = 4, kPunctuation = 5, kIdeograph = 6, kKana = 7 };
constexpr uint32_t kTableSize = 0x20000;  // beyond it all is ideographs, for us
constexpr uint32_t kEllipsis = 0x2026;

inline uint64_t mix(uint64_t x) {  // splitmix64's finalizer
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
inline uint64_t add(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x9e3779b97f4a7c15ull + (hash >> 29); }

// Counts keys; cleared by raising a mark, so that a short text does not pay for the table of a long one.
class CountTable {
 public:
  void begin(size_t keys) {
    size_t wanted = 64;
    while (wanted < 2 * keys) wanted *= 2;
    if (wanted > slots_.size()) slots_.assign(wanted, Slot{0, 0, 0});
    mask_ = wanted - 1;
    if (++mark_ == 0) {
      std::fill(slots_.begin(), slots_.end(), Slot{0, 0, 0});
      mark_ = 1;
    }
  }
  uint32_t count(uint64_t key) {  // how often it came, with this time
    size_t at = mix(key) & mask_;
    while (slots_[at].mark == mark_ && slots_[at].key != key) at = (at + 1) & mask_;
    Slot& slot = slots_[at];
    if (slot.mark != mark_) slot = Slot{key, mark_, 0};
    return ++slot.times;
  }

 private:
  struct Slot {
    uint64_t key;
    uint32_t mark, times;
  };
  std::vector<Slot> slots_;
  size_t mask_ = 0;
  uint32_t mark_ = 0;
};

// Copies among pieces of a text (lines, paragraphs).
struct Pieces {
  int64_t pieces = 0, characters = 0, copies = 0, copied_characters = 0;
  std::vector<std::pair<uint64_t, int64_t>> all;

  void add_piece(uint64_t hash, int64_t length) { all.emplace_back(hash, length); }
  void settle(CountTable& table) {
    table.begin(all.size());
    for (const auto& [hash, length] : all) {
      ++pieces;
      characters += length;
      if (table.count(hash) > 1) {
        ++copies;
        copied_characters += length;
      }
    }
  }
};

class TextMeasures {
 public:
  TextMeasures(py::array_t<uint8_t, py::array::c_style | py::array::forcecast> table, const std::u32string& end_marks,
               const std::u32string& bullets, const std::vector<std::u32string>& stop_words, bool by_character, int64_t line_words,
               std::vector<int64_t> top, std::vector<int64_t> duplicate)
      : by_character_(by_character), line_words_(line_words), top_(std::move(top)), duplicate_(std::move(duplicate)),
        table_(table.data(), table.data() + table.size()), end_marks_(end_marks), bullets_(bullets) {
    if (table.size() != kTableSize) throw py::value_error("the table of classes has 0x20000 entries");
    for (const std::u32string& word : stop_words) {
      uint64_t hash = 1;
      for (char32_t c : word) hash = add(hash, c);
      stop_.insert(hash);
    }
  }

  py::tuple measure(py::str text) {
    PyObject* object = text.ptr();
    const int64_t size = PyUnicode_GET_LENGTH(object);
    const void* data = PyUnicode_DATA(object);
    const int kind = PyUnicode_KIND(object);
    reset();
    if (kind == PyUnicode_1BYTE_KIND) walk(static_cast<const uint8_t*>(data), size);
    else if (kind == PyUnicode_2BYTE_KIND) walk(static_cast<const uint16_t*>(data), size);
    else walk(static_cast<const uint32_t*>(data), size);
    lines_.settle(counts_);
    paragraphs_.settle(counts_);
    grams();
    return py::make_tuple(classes_[kSymbol], classes_[kLetter], classes_[kDigit], classes_[kMark], classes_[kPunctuation],
                          classes_[kIdeograph], classes_[kKana], int64_t(hashes_.size()), word_characters_, alphabetic_, stop_found_,
                          hash_signs_, ellipses_, bullet_lines_, ellipsis_lines_, sentence_lines_,
                          std::vector<int64_t>{lines_.pieces, lines_.characters, lines_.copies, lines_.copied_characters},
                          std::vector<int64_t>{paragraphs_.pieces, paragraphs_.characters, paragraphs_.copies, paragraphs_.copied_characters},
                          top_found_, duplicate_found_);
  }

 private:
  void reset() {
    std::fill(std::begin(classes_), std::end(classes_), 0);
    word_characters_ = alphabetic_ = stop_found_ = hash_signs_ = ellipses_ = 0;
    bullet_lines_ = ellipsis_lines_ = sentence_lines_ = 0;
    lines_ = Pieces();
    paragraphs_ = Pieces();
    hashes_.clear();
    lengths_.clear();
  }

  Class class_of(uint32_t c) const { return c < kTableSize ? Class(table_[c]) : kIdeograph; }

  template <class Char>
  void walk(const Char* text, int64_t size) {
    uint64_t paragraph = 1;
    int64_t paragraph_characters = 0;
    for (int64_t begin = 0; begin <= size;) {
      int64_t end = begin;
      while (end < size && text[end] != '\n') ++end;
      int64_t first = begin, last = end;
      while (first < last && class_of(text[first]) == kSpace) ++first;
      while (last > first && class_of(text[last - 1]) == kSpace) --last;
      if (first < last) {
        const uint64_t hash = line(text, first, last);
        paragraph = add(paragraph, hash);
        paragraph_characters += last - first;
      }
      if ((first == last || end == size) && paragraph_characters > 0) {
        paragraphs_.add_piece(paragraph, paragraph_characters);
        paragraph = 1;
        paragraph_characters = 0;
      }
      begin = end + 1;
    }
  }

  template <class Char>
  uint64_t line(const Char* text, int64_t first, int64_t last) {
    uint64_t hash = 1;
    const size_t words_before = hashes_.size();
    int64_t run = 0;         // dots or ellipsis marks that end here
    bool of_dots = false;
    for (int64_t i = first; i < last; ++i) {
      const uint32_t c = text[i];
      hash = add(hash, c);
      ++classes_[class_of(c)];
      hash_signs_ += c == '#';
      const bool dot = c == '.', mark = c == kEllipsis;
      if (run && !((dot && of_dots) || (mark && !of_dots))) {
        ellipses_ += !of_dots || run >= 3;
        run = 0;
      }
      if (dot || mark) {
        of_dots = dot;
        ++run;
      }
    }
    if (run) ellipses_ += !of_dots || run >= 3;
    words(text, first, last);
    lines_.add_piece(hash, last - first);
    const uint32_t final = text[last - 1];
    bullet_lines_ += bullets_.find(char32_t(text[first])) != std::u32string::npos;
    ellipsis_lines_ += final == kEllipsis || (last - first >= 3 && final == '.' && text[last - 2] == '.' && text[last - 3] == '.');
    sentence_lines_ += end_marks_.find(char32_t(final)) != std::u32string::npos || int64_t(hashes_.size() - words_before) >= line_words_;
    return hash;
  }

  template <class Char>
  void words(const Char* text, int64_t first, int64_t last) {
    for (int64_t i = first; i < last;) {
      const Class c = class_of(text[i]);
      int64_t end = i + 1;
      if (by_character_) {
        if (c == kIdeograph || c == kKana) {
          word(text, i, end);
        } else if (c == kLetter || c == kDigit || c == kMark) {
          while (end < last && (class_of(text[end]) == kLetter || class_of(text[end]) == kDigit || class_of(text[end]) == kMark)) ++end;
          word(text, i, end);
        }
      } else if (c != kSpace) {
        while (end < last && class_of(text[end]) != kSpace) ++end;
        word(text, i, end);
      }
      i = end;
    }
  }

  static bool of_a_word(Class c) { return c == kLetter || c == kDigit || c == kMark || c == kIdeograph || c == kKana; }

  template <class Char>
  void word(const Char* text, int64_t begin, int64_t end) {
    uint64_t whole = 1, inner = 1;
    bool letter = false;
    int64_t from = begin, to = end;
    while (from < to && !of_a_word(class_of(text[from]))) ++from;
    while (to > from && !of_a_word(class_of(text[to - 1]))) --to;
    for (int64_t i = begin; i < end; ++i) {
      const Class c = class_of(text[i]);
      letter |= c == kLetter || c == kIdeograph || c == kKana;
      whole = add(whole, text[i]);
      if (i >= from && i < to) inner = add(inner, text[i]);
    }
    hashes_.push_back(whole);
    lengths_.push_back(by_character_ ? 1 : end - begin);
    alphabetic_ += letter;
    word_characters_ += to - from;
    stop_found_ += to > from && stop_.count(inner);
  }

  void grams() {
    const size_t words = hashes_.size();
    std::vector<int64_t> sums(words + 1, 0);
    for (size_t i = 0; i < words; ++i) sums[i + 1] = sums[i] + lengths_[i];
    top_found_.assign(top_.size(), 0);
    duplicate_found_.assign(duplicate_.size(), 0);
    for (size_t which = 0; which < top_.size(); ++which) {
      const size_t n = size_t(top_[which]);
      if (words < n) continue;
      counts_.begin(words);
      uint32_t most = 1;
      int64_t longest = 0;
      for (size_t i = 0; i + n <= words; ++i) {
        const uint32_t times = counts_.count(gram(i, n));
        const int64_t characters = sums[i + n] - sums[i];
        if (times > most || (times == most && most > 1 && characters > longest)) {
          most = times;
          longest = characters;
        }
      }
      top_found_[which] = most > 1 ? most * longest : 0;
    }
    for (size_t which = 0; which < duplicate_.size(); ++which) {
      const size_t n = size_t(duplicate_[which]);
      if (words < n) continue;
      counts_.begin(words);
      size_t covered = 0;  // words before this one have been counted
      int64_t characters = 0;
      for (size_t i = 0; i + n <= words; ++i) {
        if (counts_.count(gram(i, n)) > 1) {
          characters += sums[i + n] - sums[std::max(i, covered)];
          covered = i + n;
        }
      }
      duplicate_found_[which] = characters;
      if (characters == 0 && which + 1 < duplicate_.size() && duplicate_[which + 1] > duplicate_[which]) break;  // longer ones neither
    }
  }

  uint64_t gram(size_t i, size_t n) const {
    uint64_t hash = n;
    for (size_t k = i; k < i + n; ++k) hash = add(hash, hashes_[k]);
    return hash;
  }

  const bool by_character_;
  const int64_t line_words_;
  const std::vector<int64_t> top_, duplicate_;
  const std::vector<uint8_t> table_;
  const std::u32string end_marks_, bullets_;
  std::unordered_set<uint64_t> stop_;
  CountTable counts_;
  int64_t classes_[8] = {};
  int64_t word_characters_ = 0, alphabetic_ = 0, stop_found_ = 0, hash_signs_ = 0, ellipses_ = 0;
  int64_t bullet_lines_ = 0, ellipsis_lines_ = 0, sentence_lines_ = 0;
  Pieces lines_, paragraphs_;
  std::vector<uint64_t> hashes_;
  std::vector<int64_t> lengths_;
  std::vector<int64_t> top_found_, duplicate_found_;
};

}  // namespace

void add_text_measures(py::module_& m) {
  py::class_<TextMeasures>(m, "TextMeasures")
      .def(py::init<py::array_t<uint8_t, py::array::c_style | py::array::forcecast>, const std::u32string&, const std::u32string&,
                    const std::vector<std::u32string>&, bool, int64_t, std::vector<int64_t>, std::vector<int64_t>>(),
           py::arg("table"), py::arg("end_marks"), py::arg("bullets"), py::arg("stop_words"), py::arg("by_character"),
           py::arg("line_words"), py::arg("top"), py::arg("duplicate"))
      .def("measure", &TextMeasures::measure, py::arg("text"));
}
