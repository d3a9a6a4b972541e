// The ids of segments of text, remembered: what makes a SentencePiece BPE tokenizer fast.
//
// Such a tokenizer merges neighbours into pieces of its vocabulary, over a whole text. Where no piece has the character a
// followed by b, no merge ever crosses a place between an a and a b, and the text may be cut there: the ids of the whole
// are those of its segments. Segments are short (a word, a run of punctuation) and repeat; the ids of each are asked for
// once and looked up from then on. megatron_lite/text/sentencepiece_segments.py has the other half: who is asked.
//
// Text in ASCII is normalised here (a table, runs of spaces, a mark before it), as sentencepiece does it to such text.
//
// Linked into the module of data_index.cpp.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

constexpr char kMark[] = "\xe2\x96\x81";  // U+2581 stands for a space
constexpr uint32_t kMarkCode = 0x2581, kMarkSlot = 128;
constexpr size_t kLongest = 64;              // bytes of a segment that is remembered
constexpr size_t kMostRemembered = 1 << 26;  // 32-bit words of segments and ids; then all is forgotten
constexpr uint8_t kDeleted = 0xff;

constexpr uint64_t kHashStart = 0x9e3779b97f4a7c15ull;
inline uint64_t hash_more(uint64_t hash, const char* from, const char* to) {
  for (; from < to; ++from) hash = (hash ^ static_cast<uint8_t>(*from)) * 0x100000001b3ull;
  return hash;
}
inline uint64_t hash_end(uint64_t hash) { return hash ^ hash >> 29 ^ hash >> 47; }

inline bool equal(const char* a, const char* b, size_t size) {  // short ones, for which a call is dear
  for (size_t i = 0; i < size; ++i)
    if (a[i] != b[i]) return false;
  return true;
}

// The code point at p, which is moved behind it; the text is UTF-8.
inline uint32_t next(const char*& p) {
  const auto byte = [&](int i) { return static_cast<uint8_t>(p[i]); };
  const uint8_t first = byte(0);
  uint32_t code = first;
  if (first < 0x80) {
    p += 1;
  } else if (first < 0xe0) {
    code = (first & 0x1fu) << 6 | (byte(1) & 0x3fu);
    p += 2;
  } else if (first < 0xf0) {
    code = (first & 0x0fu) << 12 | (byte(1) & 0x3fu) << 6 | (byte(2) & 0x3fu);
    p += 3;
  } else {
    code = (first & 0x07u) << 18 | (byte(1) & 0x3fu) << 12 | (byte(2) & 0x3fu) << 6 | (byte(3) & 0x3fu);
    p += 4;
  }
  return code;
}

struct Entry {  // count is 0 for an empty slot; no segment is without ids
  uint64_t hash = 0;
  uint32_t at = 0;  // in the pool: the bytes, then the ids
  uint16_t size = 0, count = 0;
};

// One call's segments: ids of known ones, and which unknown ones come where between them.
struct Batch {
  std::vector<std::string> unknown;
  std::vector<uint32_t> ids;
  std::vector<uint32_t> before, which;           // ids before each place of an unknown segment, and which segment it is
  std::vector<size_t> text_ids, text_unknown;    // where each text's ids and places end
};

class Segments {
 public:
  // table: for each ASCII character what it becomes: another, or 0xff for nothing. collapse: spaces at the ends go, runs
  // become one. prefix: a mark is put before a text. pieces: of the vocabulary.
  Segments(const py::bytes& table, bool collapse, bool prefix, const py::list& pieces)
      : table_(table), collapse_(collapse), prefix_(prefix), slots_(1 << 16) {
    if (table_.size() != 128) throw py::value_error("the table has a byte for each of the 128 characters of ASCII");
    near_.assign(129 * 256, false);
    for (const py::handle& piece : pieces) {
      const std::string text = py::cast<std::string>(piece);
      const char *p = text.data(), *end = p + text.size();
      for (uint32_t before = ~0u; p < end;) {
        const uint32_t code = next(p);
        if (before != ~0u && is_near(before) && is_near(code)) near_[slot(before) * 256 + slot(code)] = true;
        else if (before != ~0u) far_.insert(uint64_t{before} << 32 | code);
        before = code;
      }
    }
  }

  // The segments of texts, ASCII ones as they are and others normalised.
  Batch split(const py::list& texts) {
    std::vector<std::pair<std::string_view, bool>> views;
    views.reserve(texts.size());
    for (const py::handle& text : texts) {
      Py_ssize_t size = 0;
      const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
      if (data == nullptr) throw py::error_already_set();
      views.emplace_back(std::string_view(data, size), PyUnicode_IS_ASCII(text.ptr()) != 0);
    }
    py::gil_scoped_release released;
    std::lock_guard<std::mutex> guard(lock_);
    if (pool_.size() > kMostRemembered) forget();
    Batch batch;
    std::unordered_map<std::string_view, uint32_t> unknown;
    std::vector<std::string> buffers(views.size());  // segments that are unknown lie in them
    for (size_t i = 0; i < views.size(); ++i) {
      if (views[i].second) normalise(views[i].first, buffers[i]);
      look_up(views[i].second ? std::string_view(buffers[i]) : views[i].first, batch, unknown);
      batch.text_ids.push_back(batch.ids.size());
      batch.text_unknown.push_back(batch.which.size());
    }
    return batch;
  }

  // (ids, their number for each text), with the ids of the unknown segments, back to back, which are remembered.
  py::tuple join(const Batch& batch, const py::array_t<uint32_t, py::array::c_style | py::array::forcecast>& ids,
                 const py::array_t<int64_t, py::array::c_style | py::array::forcecast>& lengths) {
    if (static_cast<size_t>(lengths.size()) != batch.unknown.size()) throw py::value_error("a length for each segment");
    std::vector<size_t> starts{0};
    for (py::ssize_t i = 0; i < lengths.size(); ++i) starts.push_back(starts.back() + lengths.data()[i]);
    if (starts.back() != static_cast<size_t>(ids.size())) throw py::value_error("the lengths do not sum to the ids");
    size_t total = batch.ids.size();
    for (uint32_t w : batch.which) total += starts[w + 1] - starts[w];
    py::array_t<uint32_t> out(total);
    py::array_t<int64_t> counts(batch.text_ids.size());
    fill(batch, ids.data(), starts, out.mutable_data(), counts.mutable_data());
    return py::make_tuple(out, counts);
  }

  std::string normalised(const std::string& text) const {
    std::string out;
    normalise(text, out);
    return out;
  }

 private:
  void normalise(std::string_view text, std::string& out) const {
    out.resize(3 * text.size() + 3);
    char* to = out.data();
    const auto mark = [&] {
      std::memcpy(to, kMark, 3);
      to += 3;
    };
    if (prefix_) mark();
    const char* const start = to;
    bool space = collapse_;  // a space here would be the second of a run, or at the start
    const char *p = text.data(), *const end = p + text.size();
    while (p < end) {
      const uint8_t become = static_cast<uint8_t>(table_[static_cast<uint8_t>(*p++)]);
      if (become == kDeleted) continue;
      if (become != ' ') {
        *to++ = static_cast<char>(become);
        space = false;
        for (; p < end && *p > ' ' && table_[static_cast<uint8_t>(*p)] == *p; ++p) *to++ = *p;  // nearly always
      } else if (!space) {
        mark();
        space = collapse_;
      }
    }
    if (collapse_ && space && to > start) to -= 3;
    out.resize(to == start ? 0 : to - out.data());
  }

  static bool is_near(uint32_t code) { return code < 128 || code == kMarkCode; }
  static uint32_t slot(uint32_t code) { return code < 128 ? code : kMarkSlot; }

  bool joined(uint32_t before, uint32_t code) const {
    if (is_near(before) && is_near(code)) return near_[slot(before) * 256 + slot(code)];
    return far_.count(uint64_t{before} << 32 | code) != 0;
  }

  void look_up(std::string_view text, Batch& batch, std::unordered_map<std::string_view, uint32_t>& unknown) {
    const char *p = text.data(), *const end = p + text.size();
    while (p < end) {
      const char* const begin = p;
      uint32_t before = next(p);
      uint64_t hash = hash_more(kHashStart, begin, p);
      while (p < end) {
        const auto byte = static_cast<uint8_t>(*p);
        if (byte < 128 && is_near(before)) {
          if (!near_[slot(before) * 256 + byte]) break;
          before = byte;
          hash = (hash ^ byte) * 0x100000001b3ull;
          ++p;
          continue;
        }
        const char* behind = p;
        const uint32_t code = next(behind);
        if (!joined(before, code)) break;
        hash = hash_more(hash, p, behind);
        before = code;
        p = behind;
      }
      const size_t size = p - begin;
      const Entry* entry = size <= kLongest ? find(begin, size, hash_end(hash)) : nullptr;
      if (entry != nullptr) {
        const uint32_t* from = pool_.data() + entry->at + (size + 3) / 4;
        for (uint32_t i = 0; i < entry->count; ++i) batch.ids.push_back(from[i]);
        continue;
      }
      const auto [place, is_new] = unknown.try_emplace(std::string_view(begin, size), batch.unknown.size());
      if (is_new) batch.unknown.emplace_back(begin, size);
      batch.before.push_back(batch.ids.size());
      batch.which.push_back(place->second);
    }
  }

  void fill(const Batch& batch, const uint32_t* from, const std::vector<size_t>& starts, uint32_t* to, int64_t* count) {
    py::gil_scoped_release released;
    size_t known = 0, place = 0;
    for (size_t text = 0; text < batch.text_ids.size(); ++text) {
      const uint32_t* const begin = to;
      for (; place < batch.text_unknown[text]; ++place) {
        to = std::copy(batch.ids.data() + known, batch.ids.data() + batch.before[place], to);
        known = batch.before[place];
        to = std::copy(from + starts[batch.which[place]], from + starts[batch.which[place] + 1], to);
      }
      to = std::copy(batch.ids.data() + known, batch.ids.data() + batch.text_ids[text], to);
      known = batch.text_ids[text];
      count[text] = to - begin;
    }
    std::lock_guard<std::mutex> guard(lock_);
    for (size_t w = 0; w < batch.unknown.size(); ++w) remember(batch.unknown[w], from + starts[w], starts[w + 1] - starts[w]);
  }

  const Entry* find(const char* data, size_t size, uint64_t hash) const {
    for (size_t at = hash & (slots_.size() - 1);; at = (at + 1) & (slots_.size() - 1)) {
      const Entry& entry = slots_[at];
      if (entry.count == 0) return nullptr;
      if (entry.hash == hash && entry.size == size && equal(reinterpret_cast<const char*>(pool_.data() + entry.at), data, size))
        return &entry;
    }
  }

  void remember(const std::string& segment, const uint32_t* ids, size_t count) {
    const uint64_t hash = hash_end(hash_more(kHashStart, segment.data(), segment.data() + segment.size()));
    if (segment.size() > kLongest || count == 0 || find(segment.data(), segment.size(), hash) != nullptr) return;
    if (2 * ++used_ > slots_.size()) {
      std::vector<Entry> old(2 * slots_.size());
      old.swap(slots_);
      for (const Entry& entry : old)
        if (entry.count != 0) place(entry);
    }
    const size_t at = pool_.size();
    pool_.resize(at + (segment.size() + 3) / 4);
    std::memcpy(pool_.data() + at, segment.data(), segment.size());
    pool_.insert(pool_.end(), ids, ids + count);
    place(Entry{hash, static_cast<uint32_t>(at), static_cast<uint16_t>(segment.size()), static_cast<uint16_t>(count)});
  }

  void place(const Entry& entry) {
    size_t at = entry.hash & (slots_.size() - 1);
    while (slots_[at].count != 0) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = entry;
  }

  void forget() {
    slots_.assign(1 << 16, Entry{});
    pool_.clear();
    used_ = 0;
  }

  std::string table_;
  bool collapse_, prefix_;
  std::mutex lock_;
  std::vector<char> near_;              // pairs of ASCII and the mark that are in some piece
  std::unordered_set<uint64_t> far_;    // other pairs
  std::vector<Entry> slots_;            // open addressing; their number is a power of two
  std::vector<uint32_t> pool_;
  size_t used_ = 0;
};

}  // namespace

void add_segments(py::module_& m) {
  py::class_<Batch>(m, "SegmentBatch").def_property_readonly("unknown", [](const Batch& batch) {
    py::list segments;
    for (const std::string& segment : batch.unknown) segments.append(py::str(segment));
    return segments;
  });
  py::class_<Segments>(m, "Segments")
      .def(py::init<const py::bytes&, bool, bool, const py::list&>(), py::arg("table"), py::arg("collapse"),
           py::arg("prefix"), py::arg("pieces"))
      .def("split", &Segments::split, py::arg("texts"))
      .def("join", &Segments::join, py::arg("batch"), py::arg("ids"), py::arg("lengths"))
      .def("normalised", &Segments::normalised, py::arg("text"));
}
