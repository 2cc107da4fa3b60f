// Files that are written, on this machine and in buckets. A file is there whole or not at all: a reader sees what was
// there before until the new one is complete, also where the writer dies on the way. A bucket has no other promises: it
// knows neither appending nor renaming, and a file that comes last says that those before it are there.
//
// Requests that fail are tried again, with longer and longer pauses: by the storage's library, and then the whole file.
// Every error is io and names the location without key and secret. Thread safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/storage/storage.h"

namespace md {

/// Replaces the file by `text`.
void put_text(const std::string& location, std::string_view text);
/// Replaces the file by a copy of `file` as it is now; what is written to it meanwhile is left out.
void put_file(const std::string& file, const std::string& location);
/// put_file of what is also at `same`, a location in the same bucket, which the storage copies by itself where it can.
void put_file_like(const std::string& same, const std::string& file, const std::string& location);
/// The text of a file.
std::string get_text(const std::string& location);
/// The bytes [offset, offset + size) of a file.
Blob get_range(const InputFile& file, int64_t offset, int64_t size);
/// Replaces the file `path` of this machine by a copy of `found`.
void get_file(const FoundFile& found, const std::string& path);
/// The file, where there is one.
std::optional<FoundFile> find_file(const std::string& location);
/// Every file below a folder, hidden ones too, in no particular order; none where there is no folder.
std::vector<FoundFile> list_all_files(const std::string& folder);
/// Does nothing where it is gone already.
void remove_file(const std::string& location);
/// Removes a folder and all below it.
void remove_folder(const std::string& folder);

}  // namespace md
