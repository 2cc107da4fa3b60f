// Atomic writes of local files and of files in object stores: readers see the previous file until the new one is
// complete, also if the writer dies. Object stores neither append nor rename, so a file written last marks a group of
// files as complete.

// Failed requests are retried with growing delays, by the storage's library and then for the whole file. Every error is
// io and names the location without key and secret. Thread safe.
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
/// Replaces the file by a copy of `file` as it is now; later writes are not included.
void put_file(const std::string& file, const std::string& location);
/// put_file of a file that also exists at `same` in the same bucket; the server copies it if it can.
void put_file_like(const std::string& same, const std::string& file, const std::string& location);
/// The text of a file.
std::string get_text(const std::string& location);
/// The bytes [offset, offset + size) of a file.
Blob get_range(const InputFile& file, int64_t offset, int64_t size);
/// Replaces the file `path` of this machine by a copy of `found`.
void get_file(const FoundFile& found, const std::string& path);
/// The file, if it exists.
std::optional<FoundFile> find_file(const std::string& location);
/// Every file below a folder, including hidden ones, in any order; empty if there is no folder.
std::vector<FoundFile> list_all_files(const std::string& folder);
/// No effect if it does not exist.
void remove_file(const std::string& location);
/// Removes a folder and all below it.
void remove_folder(const std::string& folder);

}  // namespace md
