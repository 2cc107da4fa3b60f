// Records without a caption, counted and named in a warning: for all kinds of data.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "maxdiffusion/data/records/records.h"

namespace md {

struct MissingCaptions {
  std::string where;              // the data, for messages
  std::string things = "images";  // or "clips", "records"
  int64_t missing = 0, all = 0;
  std::string expected;                      // where captions are, ".txt or metadata.jsonl"; may be empty
  std::string instead = "an empty caption";  // what they train with
  std::string hint;                          // what to try; may be empty
};
/// Warns that some have no caption, if there are any. The same warning is logged once.
void warn_of_missing(const MissingCaptions& count);

/// The source, whose records without a caption are counted while they are read, each once. A warning names the first
/// one, another says how many there are of how many: when all records have been read, or else when one is read again or
/// the source is destroyed.
std::shared_ptr<const RecordSource> with_counted_captions(std::shared_ptr<const RecordSource> source);

}  // namespace md
