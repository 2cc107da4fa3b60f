// The kinds of source, one file each; open_source.cc lists them.
#pragma once

#include <optional>

#include "maxdiffusion/data/records/open_source.h"

namespace md {

using SourcePtr = std::shared_ptr<const RecordSource>;
using Files = std::vector<FoundFile>;

SourcePtr image_folder_source(const std::string& folder, const DataSourceConfig& config);
SourcePtr clip_folder_source(const std::string& folder, const DataSourceConfig& config);
SourcePtr table_source(const Files& files, const DataSourceConfig& config);
SourcePtr tfrecord_source(const Files& files, const DataSourceConfig& config);
SourcePtr tar_source(const Files& files, const DataSourceConfig& config);
SourcePtr array_record_source(const Files& files, const DataSourceConfig& config);
SourcePtr synthetic_source(const DataSourceConfig& config);

/// For messages: the first file, and how many more there are.
std::string place_of(const Files& files);
/// "a, b, c".
std::string joined(const std::vector<std::string>& names);
/// The columns that a config asks for, as found among `columns`.
struct WantedColumns {
  std::vector<std::string> names;  // as they are stored
  std::vector<std::string> keys;   // their names in Record::arrays; "" for image and caption
};
/// Picture and caption, or the arrays. Throws io naming `where` and listing the columns when one is missing.
WantedColumns wanted_columns(const DataSourceConfig& config, const std::vector<std::string>& columns,
                             const std::string& where);
/// A record from the bytes of a tf.Example: the image's and caption's features, or the arrays', each a serialized
/// TensorProto or a list of numbers. Throws io.
Record record_of_example(std::string_view bytes, const DataSourceConfig& config, const std::string& name);
/// The part of a source's fingerprint that says which columns are read.
std::string columns_key(const DataSourceConfig& config);

/// Whether the files of a folder are clips: there are videos among them and no pictures.
bool holds_clips(const Files& files);

/// Trims blanks at both ends.
std::string trimmed(const std::string& s);

/// Throws io where a file claims to hold more than its size allows, before memory of that size is allocated.
void check_claim(int64_t count, const FoundFile& file, const char* what);

}  // namespace md
