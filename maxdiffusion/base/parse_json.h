// JSON from text. The parser of nlohmann/json.hpp is a template that takes one to two seconds to compile wherever it is
// called; here it is compiled once. NaN, Infinity and -Infinity are numbers, as in what Python's json writes.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace md {

/// Throws nlohmann::json::parse_error, which says where.
nlohmann::json parse_json(std::string_view text);
/// Text that is no JSON gives a value that is_discarded().
nlohmann::json parse_json_or_discard(std::string_view text);
/// As Python's json writes it; numbers that are not finite, too. `indent`: as nlohmann's dump.
std::string dump_json(nlohmann::json value, int indent = -1);

}  // namespace md
