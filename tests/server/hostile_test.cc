// About a hundred hostile requests of each kind: framing, numbers, sizes, nesting. Each is answered with its status in
// bounded time and memory, and the next honest request has the same image as before.
#include <chrono>

#include "maxdiffusion/base/base64.h"
#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/media/image.h"
#include "tests/cli/command.h"
#include "tests/server/server.h"

namespace md {
namespace {

const std::string kSd = MD_SOURCE_DIR "/tests/golden/pipelines/sd";
const std::string T = "/sdapi/v1/txt2img", I = "/sdapi/v1/img2img", G = "/v1/images/generations";

class Hostile : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    server = new TestServer({kSd, "height=16", "width=16", "num_inference_steps=2", "warm_up=false", "max_steps=20",
                             "max_images=4", "max_body_mb=4", "allowed_origins=http://localhost:5001"});
  }
  static void TearDownTestSuite() { delete server; }
  void SetUp() override { before_ = honest(), memory_ = server->resident_mb(); }
  void TearDown() override {
    ASSERT_TRUE(server->runs()) << server->log();
    EXPECT_TRUE(honest() == before_);
    EXPECT_LT(server->resident_mb(), memory_ + 300);
    EXPECT_FALSE(contains(server->log(), "loaded one at a time")) << server->log();
  }
  static std::string honest() {
    const Answer a = server->post(T, {{"prompt", "a star"}, {"seed", 3}});
    EXPECT_EQ(a.status, 200) << a.body.substr(0, 500);
    return a.value()["images"].dump();
  }
  /// The status of raw bytes; after what was sent the client waits.
  static int status(const std::string& bytes) {
    const auto start = std::chrono::steady_clock::now();
    const int its = server->send(bytes).status;
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60)) << bytes.substr(0, 200);
    return its;
  }
  /// A refusal's text, of a status of 4xx.
  static std::string refusal(const std::string& path, const json& body) {
    const auto start = std::chrono::steady_clock::now();
    const Answer a = server->post(path, body);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10)) << body.dump().substr(0, 200);
    EXPECT_TRUE(a.status >= 400 && a.status < 500) << a.status << " " << body.dump().substr(0, 200) << a.body;
    return a.body;
  }
  inline static TestServer* server = nullptr;
  std::string before_;
  double memory_ = 0;
};

TEST_F(Hostile, FramingThatOthersMayReadDifferentlyIs400) {
  const std::string body = R"({"prompt": "x"})", type = "Content-Type: application/json\r\n";
  const auto post = [&](const std::string& headers, const std::string& sent,
                        const std::string& line = "POST " + G + " HTTP/1.1\r\n") {
    return status(line + headers + "\r\n" + sent);
  };
  const std::string host = "Host: localhost\r\n", length = fmt::format("Content-Length: {}\r\n", body.size());
  EXPECT_EQ(post(host + type + length, body), 200);
  EXPECT_EQ(post(host + type + "Transfer-Encoding: chunked\r\n", "f\r\n" + body + "\r\n0\r\n\r\n"), 200);
  for (const std::string& headers : {
           host + type + length + "Transfer-Encoding: chunked\r\n",
           host + type + "Transfer-Encoding: chunked\r\n" + length,
           host + type + length + length,
           host + type + length + "Content-Length: 3\r\n",
           host + host + type + length,
           host + "Host: evil.example\r\n" + type + length,
           type + length,
           host + type + type + length,
           host + type + "Transfer-Encoding: gzip, chunked\r\n",
           host + type + "Transfer-Encoding: identity\r\n",
           host + type + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
           host + type + "Transfer-Encoding : chunked\r\n",
           host + type +
               "Transfer-Encoding:\x0b"
               "chunked\r\n",
           host + type + "Content-Length: +15\r\n",
           host + type + "Content-Length: -1\r\n",
           host + type + "Content-Length: 0x0f\r\n",
           host + type + "Content-Length: 15, 15\r\n",
           host + type + "Content-Length: 99999999999999999999\r\n",
           host + type + "Content-Length:\r\n",
           host + type + "Content-Length : 15\r\n",
           host + type + length + "X: a\r\n continued\r\n",
           host + type + length + "\tContinued: x\r\n",
           host + type + length + "X\r\n",
           host + type + length + ": x\r\n",
           host + type + length + "X Y: z\r\n",
           host + type + length + "X: a\nY: b\r\n",
           host + type + length + "X: a\rY: b\r\n",
           host + type + length + std::string("X: a\0b\r\n", 8),
           host + type + length + "X: \x7f\r\n",
           host + "Authorization: a\r\nAuthorization: b\r\n" + type + length,
           host + "Origin: http://localhost\r\nOrigin: http://evil.example\r\n" + type + length,
           host + "\n" + type + length,
       })
    EXPECT_EQ(post(headers, body), 400) << headers;
  for (const std::string& line : {"POST " + G + " HTTP/1.1\n", "POST " + G + "\r\n", "POST " + G + " HTTP/2.0\r\n",
                                  " POST " + G + " HTTP/1.1\r\n", "POST  " + G + " HTTP/1.1\r\n",
                                  "\r\nPOST " + G + " HTTP/1.1\r\n", "POST " + G + "\t HTTP/1.1 \r\n"})
    EXPECT_EQ(post(host + type + length, body, line), 400) << line;
  for (const std::string& chunks :
       {"0xf\r\n" + body + "\r\n0\r\n\r\n", "+f\r\n" + body + "\r\n0\r\n\r\n", "-1\r\n" + body + "\r\n0\r\n\r\n",
        " f\r\n" + body + "\r\n0\r\n\r\n", "f \r\n" + body + "\r\n0\r\n\r\n", "f\n" + body + "\r\n0\r\n\r\n",
        "f\r\n" + body + "\n0\r\n\r\n", "f\r\n" + body + "0\r\n\r\n", "ffffffffffffffffff\r\n" + body + "\r\n0\r\n\r\n",
        "\r\n" + body + "\r\n0\r\n\r\n", "g\r\n" + body + "\r\n0\r\n\r\n", "f\r\n" + body + "xx\r\n0\r\n\r\n"})
    EXPECT_EQ(post(host + type + "Transfer-Encoding: chunked\r\n", chunks), 400) << chunks;
}

TEST_F(Hostile, NumbersAreCheckedAsTheyAreGiven) {
  const auto names = [&](const std::string& path, json body, const std::string& name, const json& value) {
    if (!body.contains("prompt")) body["prompt"] = "x";
    body[name] = value;
    const std::string text = refusal(path, body);
    return text;
  };
  for (const json& value : {json(4294967360), json(-4294967232), json(1e300), json(9223372036854775807), json(-1),
                            json(16.5), json("64x"), json("1e999"), json(json::array({64}))}) {
    EXPECT_TRUE(contains(names(T, json::object(), "width", value), "width")) << value;
    EXPECT_TRUE(contains(names(G, json::object(), "height", value), "height")) << value;
    EXPECT_TRUE(contains(names(T, json::object(), "steps", value), "steps")) << value;
    EXPECT_TRUE(contains(names(T, json::object(), "batch_size", value), "batch_size is ")) << value;
    EXPECT_TRUE(contains(names(T, json::object(), "n_iter", value), "n_iter ")) << value;
  }
  for (const char* size : {"4294967360x64", "64x4294967360", "18446744073709551680x64", "-64x64", "64x-64", "0x0", "64",
                           "64x", "x64", "64x64x64", "6 4x64", "+64x64", "64x64 ", "1e2x64"})
    EXPECT_NE(names(G, json::object(), "size", size), "") << size;
  for (const json& value : {json(1e38), json(-1), json("NaN"), json("Infinity"), json("1e400")})
    EXPECT_TRUE(contains(names(T, json::object(), "cfg_scale", value), "scale is ")) << value;
  const std::string nan =
      server
          ->send(server->request("POST", T, R"({"prompt": "x", "cfg_scale": NaN})", {"Content-Type: application/json"}))
          .body;
  EXPECT_TRUE(contains(nan, "cfg_scale is NaN; expected a finite number")) << nan;
  HostArray rgb(Shape{DType::u8, {16, 16, 3}});
  const std::string image = to_base64(encode_png(rgb));
  const json edit = {{"init_images", {image}}, {"mask", image}, {"inpaint_full_res", true}, {"steps", 4}};
  for (const json& value : {json(-1000000), json(-1), json(1000000000), json(9223372036854775807)})
    EXPECT_TRUE(contains(names(I, edit, "inpaint_full_res_padding", value), "inpaint_full_res_padding is ")) << value;
  for (const json& value : {json(-1), json(1e9), json("Infinity")})
    EXPECT_TRUE(contains(names(I, edit, "mask_blur", value), "mask_blur")) << value;
  for (const json& value : {json(-0.1), json(1.1), json(1e300)})
    EXPECT_TRUE(contains(names(I, edit, "denoising_strength", value), "strength")) << value;
  const json made = {{"image", image}, {"num_inference_steps", 4}};
  const int64_t most = 9223372036854775807;
  for (const json& value : {json{-1, 0, 0, 0}, json{most, 0, most, 0}, json{0, 1000000, 0, 0}, json{1, 2, 3}})
    EXPECT_TRUE(contains(names("/v1/images/edits", made, "outpaint", value), "outpaint")) << value;
  for (const json& value : {json{most, most}, json{-1, 1}})
    EXPECT_TRUE(contains(names(G, json::object(), "original_size", value), "original_size")) << value;
  EXPECT_TRUE(contains(names(G, json::object(), "hires_scale", 1e200), "hires_scale") ||
              contains(names(G, json::object(), "hires_scale", 1e200), "the size of the sample"));
  EXPECT_TRUE(contains(names(T, json::object(), "seed", 1e30), "seed"));
  EXPECT_TRUE(contains(names("/sdapi/v1/options", json::object(), "CLIP_stop_at_last_layers", -3),
                       "CLIP_stop_at_last_layers is -3"));
}

TEST_F(Hostile, SidesOfImagesAreCheckedBeforeTheyAreDecoded) {
  // Headers of PNG files whose pixels would fill the memory, and two whole narrow ones.
  std::string claims = encode_png(HostArray(Shape{DType::u8, {16, 16, 3}}));
  const auto with_size = [&](uint32_t width, uint32_t height) {
    std::string out = claims;
    for (int i = 0; i < 4; ++i) {
      out[static_cast<size_t>(16 + i)] = static_cast<char>(width >> (24 - 8 * i));
      out[static_cast<size_t>(20 + i)] = static_cast<char>(height >> (24 - 8 * i));
    }
    return out;
  };
  for (const std::string& file : {encode_png(HostArray(Shape{DType::u8, {1, 200'000, 3}})),
                                  encode_png(HostArray(Shape{DType::u8, {200'000, 1, 3}})), with_size(200'000, 200'000),
                                  with_size(0, 16), with_size(0x7fffffff, 1), with_size(0xffffffff, 0xffffffff)}) {
    EXPECT_TRUE(contains(refusal(I, {{"prompt", "x"}, {"init_images", {to_base64(file)}}}), "init_images"));
    EXPECT_TRUE(contains(refusal("/v1/images/edits", {{"prompt", "x"}, {"image", to_base64(file)}}), "image"));
    EXPECT_TRUE(contains(refusal("/sdapi/v1/png-info", {{"image", to_base64(file)}}), "image"));
    EXPECT_TRUE(contains(refusal("/api/generate", {{"prompt", "x"}, {"image", to_base64(file)}}), "image"));
  }
}

TEST_F(Hostile, AThinImageIsPutBackInTheSizeOfItsMask) {
  // Only a part of the sample of 4096×16 pixels, which is enlarged to the height of the image, covers the image.
  const HostArray tall(Shape{DType::u8, {4096, 16, 3}});
  HostArray white(tall.shape());
  std::ranges::fill(white.mutable_view<uint8_t>(), uint8_t{255});
  const json body = {{"prompt", "x"},
                     {"init_images", {to_base64(encode_png(tall))}},
                     {"mask", to_base64(encode_png(white))},
                     {"inpaint_full_res", true},
                     {"width", 4096},
                     {"height", 16},
                     {"steps", 2},
                     {"denoising_strength", 1}};
  const Answer a = server->post(I, body);
  ASSERT_EQ(a.status, 200) << a.body.substr(0, 500);
  const std::string png = *from_base64(a.value()["images"][0].get<std::string>());
  EXPECT_EQ(decode_stored_image(png.data(), png.size(), "it", {.only_size = true}).size.height, 4096);
}

TEST_F(Hostile, NestingAndTypesOfBodiesAreRefused) {
  const std::string json_type = "Content-Type: application/json";
  for (const std::string& path : {T, I, G, std::string("/v1/images/edits"), std::string("/sdapi/v1/options"),
                                  std::string("/sdapi/v1/png-info"), std::string("/api/generate")})
    for (const std::string& body :
         {std::string(100'000, '['), "{\"prompt\": " + std::string(100'000, '[') + std::string(100'000, ']') + "}",
          R"({"a":)" + std::string(600, '[') + std::string(600, ']') + "}", std::string("[]"), std::string("{"),
          std::string("{\"prompt\": 1e999}"), std::string("\"\xff\"")})
      EXPECT_EQ(status(server->request("POST", path, body, {json_type})), 400) << path << body.substr(0, 40);
}

TEST_F(Hostile, OnlyAllowedPagesMayUseIt) {
  const Headers asks = {"Origin: http://localhost:5001", "Access-Control-Request-Method: POST",
                        "Access-Control-Request-Headers: content-type"};
  Answer a = server->send(server->request("OPTIONS", T, "", asks));
  EXPECT_EQ(a.status, 204);
  EXPECT_TRUE(contains(a.head, "Access-Control-Allow-Origin: http://localhost:5001")) << a.head;
  EXPECT_TRUE(contains(a.head, "Access-Control-Allow-Headers: Authorization, Content-Type, X-API-Key")) << a.head;
  a = server->get("/sdapi/v1/options", {"Origin: http://localhost:5001"});
  EXPECT_EQ(a.status, 200);
  EXPECT_TRUE(contains(a.head, "Access-Control-Allow-Origin: http://localhost:5001")) << a.head;
  a = server->get("/sdapi/v1/nothing", {"Origin: http://localhost:5001"});  // a page reads errors, too
  EXPECT_EQ(a.status, 404);
  EXPECT_TRUE(contains(a.head, "Access-Control-Allow-Origin: http://localhost:5001")) << a.head;
  for (const char* origin : {"http://localhost:5002", "https://localhost:5001", "http://localhost:5001.evil.example",
                             "http://evil.example", "null", "*"}) {
    a = server->send(
        server->request("OPTIONS", T, "", {fmt::format("Origin: {}", origin), "Access-Control-Request-Method: POST"}));
    EXPECT_EQ(a.status, 403) << origin;
    EXPECT_FALSE(contains(a.head, "Access-Control")) << a.head;
    EXPECT_EQ(server->get("/sdapi/v1/options", {fmt::format("Origin: {}", origin)}).status, 403) << origin;
  }
  EXPECT_FALSE(contains(server->get("/sdapi/v1/options").head, "Access-Control"));
}

}  // namespace
}  // namespace md
