#include "maxdiffusion/base/parse_json.h"

#include <nlohmann/json.hpp>

namespace md {

nlohmann::json parse_json(std::string_view text) { return nlohmann::json::parse(text); }
nlohmann::json parse_json_or_discard(std::string_view text) { return nlohmann::json::parse(text, nullptr, false); }

}  // namespace md
