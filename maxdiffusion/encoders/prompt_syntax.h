// Weighted prompts, and prompts longer than a CLIP text encoder's input, in the syntaxes of two programs. The text is
// split into chunks of 75 tokens between the start and the end token. Each chunk is encoded alone, the embeddings are
// weighted token by token, and the chunks' embeddings are concatenated.
//
// a1111 (AUTOMATIC1111's web UI): (word) has weight 1.1, (word:1.3) 1.3, [word] 1/1.1; nested weights multiply; \( is a
// bracket; BREAK ends a chunk, also in brackets. A chunk ends after a comma among its last 20 tokens, if there is one,
// else after its 75th token. Embeddings are multiplied by the weights, then scaled so that their mean in each encoder
// is unchanged.
//
// comfyui (ComfyUI): (word) has weight 1.1, and nested ones multiply; (word:1.3) is 1.3 at any nesting; square brackets
// are text; \( is a bracket. Fewer than 8 tokens of one weight stay in one chunk. The weight multiplies each token's
// difference from the embedding of the empty text. An encoder's pooled output is that of the first chunk.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/encoders/text_encoder.h"

namespace md {

struct WeightedText {
  std::string text;
  double weight = 1;
  bool breaks = false;  // BREAK; no text
};
/// syntax: a1111 or comfyui. Adjacent texts of equal weight are merged. Throws invalid_config for a weight that is not
/// a number, or larger than 1e6 in size.
std::vector<WeightedText> parse_weights(const std::string& syntax, const std::string& prompt);

/// One run of the encoder.
struct TokenChunk {
  std::vector<int32_t> ids;    // as long as the encoder's input, with start, end and padding
  std::vector<float> weights;  // of each token
};
/// Tokenizes a prompt; returns at least one chunk.
std::vector<TokenChunk> token_chunks(const std::string& syntax, const std::string& prompt, const Tokenizer& tokenizer,
                                     int64_t max_tokens);

/// As TextEncoder::encode, for prompts in one of these syntaxes. The first field of the conditioning is [N, chunks ·
/// max_tokens, D] of the longest prompt. Shorter ones repeat their chunks, which does not change attention; if that
/// does not come to the same number they end with padding, and FamilySpec::kChunkRows counts the rows before. For
/// families with FamilySpec::chunk_widths.
HostArrays encode_weighted(TextEncoder& text, const Family& family, const std::string& syntax,
                           const std::vector<std::string>& captions, const std::vector<std::string>& seconds,
                           int64_t clip_skip, int64_t batch);
/// Gives both the same number of rows, as above.
void make_equally_long(const FamilySpec& spec, HostArrays& a, HostArrays& b);

}  // namespace md
