// Tables of Hugging Face datasets: Parquet, and Arrow files of datasets.save_to_disk. An image is a struct {bytes,
// path}, bytes, or a text that names a file next to the table.
#include <algorithm>
#include <mutex>

#include "maxdiffusion/base/decoded_text.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/data/records/arrow_library.h"
#include "maxdiffusion/data/records/file_hashes.h"
#include "maxdiffusion/data/records/kinds.h"

namespace md {
namespace {

struct TableFile {
  std::string location;
  std::shared_ptr<const Table> table;
  SelectedColumns columns;
};

class Tables : public RecordSource, public std::enable_shared_from_this<Tables> {
 public:
  Tables(const Files& files, const DataSourceConfig& config)
      : RecordSource(files_summary(files), fingerprint_of(files) + columns_key(config),
                     {.files = names_and_sizes(files)}),
        arrays_(!config.array_columns.empty()),
        files_(files.size()) {
    parallel_for(static_cast<int64_t>(files.size()), [&](int64_t i, int) {
      TableFile& f = files_[static_cast<size_t>(i)];
      f.location = files[static_cast<size_t>(i)].location;
      f.table = arrow_library().open_table(open_input(files[static_cast<size_t>(i)]));
      f.columns = selected_columns(config, f.table->columns(), shown(f.location));
    });
    in_place_ = std::ranges::all_of(files_, [](const TableFile& f) { return f.table->in_place(); });
    for (size_t f = 0; f < files_.size(); ++f) {
      int64_t row = 0;
      const auto& rows = files_[f].table->groups();
      for (size_t g = 0; g < rows.size(); ++g) {
        check_declared_count(rows[g], files[f], "rows");
        if (rows[g] > 0) groups_.push_back({f, static_cast<int64_t>(g), rows[g], size_, row});
        size_ += rows[g], row += rows[g];
      }
    }
    open_groups_.resize(groups_.size());
  }
  int64_t size() const override { return size_; }
  int64_t shards() const override { return in_place_ ? 0 : static_cast<int64_t>(groups_.size()); }
  Record read(int64_t index) const override {
    const auto it = std::ranges::upper_bound(groups_, index, {}, &Group::first) - 1;
    const auto k = static_cast<size_t>(it - groups_.begin());
    std::shared_ptr<const TableGroup> group;
    {
      const std::lock_guard lock(mutex_);
      if (!open_groups_[k]) open_groups_[k] = load(groups_[k]);
      group = open_groups_[k];
    }
    return record(groups_[k], *group, index - it->first);
  }
  /// The record's parts are mapped: of a table that `hashes` knows only the caption's bytes are read.
  RecordContent content(int64_t index, FileHashes& hashes) const override {
    const Record r = read(index);
    RecordContent content{.name = r.name, .media = "", .caption = r.caption, .folder = -1, .fault = r.fault};
    if (r.fault.empty())
      content.media = hashes.of(fmt::format("{} {}", fingerprint(), index), [&] { return md::content_of(r).media; });
    return content;
  }
  std::unique_ptr<ShardReader> open(int64_t shard, int64_t offset) const override {
    struct Reader : ShardReader {
      std::shared_ptr<const Tables> source;
      const Group* place;
      std::shared_ptr<const TableGroup> group;
      int64_t row = 0;
      std::optional<PendingRecord> next() override {
        if (row >= place->rows) return std::nullopt;
        if (!group) group = source->load(*place);
        return [s = source, p = place, g = group, r = row++] { return s->record(*p, *g, r); };
      }
      int64_t offset() const override { return row; }
    };
    auto r = std::make_unique<Reader>();
    r->source = shared_from_this();
    r->place = &groups_[static_cast<size_t>(shard)];
    r->row = offset;
    return r;
  }

 private:
  struct Group {
    size_t file;
    int64_t number, rows, first, row;  // first: row in all tables; row: in its file
  };
  std::shared_ptr<const TableGroup> load(const Group& g) const {
    return files_[g.file].table->read(g.number, files_[g.file].columns.names);
  }
  Record record(const Group& place, const TableGroup& group, int64_t row) const {
    const TableFile& file = files_[place.file];
    const SelectedColumns& w = file.columns;
    Record r{.name = fmt::format("{} row {}", shown(file.location), place.row + row)};
    const auto type = [&](size_t c) {
      const auto& all = file.table->columns();
      return file.table->types()[static_cast<size_t>(std::ranges::find(all, w.names[c]) - all.begin())];
    };
    if (arrays_) {
      for (size_t c = 0; c < w.names.size(); ++c) {
        const Cell cell = group.cell(c, row);
        check(cell.array, Code::io, "{}: column '{}' is {}{}; expected numbers or lists of numbers", r.name, w.names[c],
              type(c), cell.null ? " and null here" : "");
        HostArray a(Shape{cell.dtype, cell.dims});
        std::copy_n(reinterpret_cast<const std::byte*>(cell.bytes.bytes.data()), a.bytes(), a.mutable_data());
        r.arrays.emplace(w.keys[c], std::move(a));
      }
      return r;
    }
    const auto cell_of = [&](size_t c) {
      Cell cell = group.cell(c, row);
      check(!cell.array, Code::io, "{}: column '{}' is {}; expected {}", r.name, w.names[c], type(c),
            c == 1 ? "text" : "an image: bytes, a struct {bytes, path}, or the name of a file");
      return cell;
    };
    const auto image_of = [&](size_t c) -> Blob {
      const Cell image = cell_of(c);
      const bool named = type(c).ends_with("string");
      const std::string path = named ? std::string(image.bytes.bytes) : image.path;
      check(!image.null, Code::io, "no image{}", c == 0 ? "" : " in '" + w.names[c] + "'");
      if (!named && !image.bytes.bytes.empty()) return image.bytes;
      const auto file_of = open_input(path.starts_with('/') || is_remote(path) ? path : sibling(file.location, path));
      return file_of->read(0, file_of->size());
    };
    cell_of(0);  // checks the image's type before the caption's
    r.caption = decoded_text(cell_of(1).bytes.bytes, fmt::format("{} '{}'", r.name, w.names[1]));
    try {
      r.image = image_of(0);
      for (size_t c = 2; c < w.names.size(); ++c) r.references.push_back(image_of(c));
    } catch (const Error& e) {
      r.fault = r.name + ": " + e.message();
    }
    return r;
  }

  bool arrays_, in_place_ = false;
  std::vector<TableFile> files_;
  std::vector<Group> groups_;
  int64_t size_ = 0;
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<const TableGroup>> open_groups_;  // only for in_place() tables
};

}  // namespace

SourcePtr table_source(const Files& files, const DataSourceConfig& config) {
  return std::make_shared<Tables>(files, config);
}

}  // namespace md
