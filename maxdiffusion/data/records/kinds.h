// The kinds of source, one file each; open_source.cc lists them.
#pragma once

#include <optional>
#include <set>
#include <string>

#include "maxdiffusion/data/records/open_source.h"

namespace md {

using SourcePtr = std::shared_ptr<const RecordSource>;
using Files = std::vector<FoundFile>;

/// The rows of the table: the name, which is the value of `dataset_type`; the suffixes by which files of a location are
/// recognized, tried in the order of the rows ("": never recognized); whether the kind has splits. A row's function is
/// NAME_source, in its own file.
#define DATA_KINDS(X)                                                 \
  X(image_folder, "", false)                                          \
  X(clip_folder, "", false)                                           \
  X(webdataset, ".tar .tar.gz .tgz .tar.bz2 .tar.xz .tar.zst", false) \
  X(tfrecord, ".tfrecord .tfrecords .tfrec", false)                   \
  X(grain, ".array_record .arrayrecord", false)                       \
  X(hf, ".parquet .arrow .feather", true)                             \
  X(tf, "", true) /* the reference's name for a whole hf */           \
  X(synthetic, "", false)

/// The source at `where`: a file, a folder or several, as list_inputs() reads them; empty for synthetic.
#define DECLARE_SOURCE(name, ...) SourcePtr name##_source(const std::string& where, const DataSourceConfig& config);
DATA_KINDS(DECLARE_SOURCE)
#undef DECLARE_SOURCE

/// A source of Parquet and Arrow files.
SourcePtr table_source(const Files& files, const DataSourceConfig& config);
/// Whether a file's name ends with one of the words of `endings`.
bool has_ending(const FoundFile& file, std::string_view endings);

/// For messages: the first file, and the number of others.
std::string files_summary(const Files& files);
/// "a, b, c".
std::string joined(const std::vector<std::string>& names);
/// The columns of a config, matched to `columns`.
struct SelectedColumns {
  std::vector<std::string> names;  // as stored
  std::vector<std::string> keys;   // their names in Record::arrays; "" for image and caption
};
/// Selects image and caption, or the arrays. Throws io naming `where` and listing the columns if one is missing.
SelectedColumns selected_columns(const DataSourceConfig& config, const std::vector<std::string>& columns,
                                 const std::string& where);
/// A record from the bytes of a tf.Example. Features are the image and caption, or arrays, each a serialized
/// TensorProto or a list of numbers. Throws io.
Record record_of_example(std::string_view bytes, const DataSourceConfig& config, const std::string& name);
/// The part of a source's fingerprint that names the columns that are read.
std::string columns_key(const DataSourceConfig& config);

/// The endings of images' names, in lower case, with the dot.
const std::set<std::string>& image_endings();
/// Whether the files of a folder are clips: it has videos and no images.
bool holds_clips(const Files& files);

/// Trims blanks at both ends.
std::string trimmed(const std::string& s);

/// Throws io if a file claims to hold more than its size allows, before memory of that size is allocated.
void check_declared_count(int64_t count, const FoundFile& file, const char* what);

}  // namespace md
