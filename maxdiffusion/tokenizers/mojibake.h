// UTF-8 that was read in another encoding ("Ã©" for "é"), found and read again. Source: ftfy 6 (R. Speer),
// fix_encoding: the same rules of what is unlikely in any text.
#pragma once

#include <string>
#include <string_view>

namespace md {

/// Whether characters stand beside each other that hardly ever do except in such text.
bool looks_misread(std::u32string_view text);
/// Read again until nothing in it looks misread or nothing more can be done: the whole text in the first encoding that
/// fits and gives UTF-8, also where no-break spaces have become spaces or single bytes were lost (U+FFFD); else the
/// parts of it that look like UTF-8; else C1 controls as Windows-1252.
std::u32string fix_encoding(std::u32string text);

}  // namespace md
