// JSON from text whose objects name each key once.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

namespace md {

/// As parse_json, without NaN and infinities. Throws io if an object at a depth of at most `depth` (0: the whole) names
/// a key twice, of which nlohmann's parser would silently keep the last.
nlohmann::json parse_unique_json(std::string_view text, int depth);

}  // namespace md
