// The interfaces of `serve`: their images equal those of the command `generate` with the same words, and errors have
// each interface's format.
#include <filesystem>

#include "maxdiffusion/base/base64.h"
#include "maxdiffusion/media/image.h"
#include "tests/cli/command.h"
#include "tests/server/server.h"

namespace md {
namespace {

const std::string kSd = MD_SOURCE_DIR "/tests/golden/pipelines/sd",
                  kSdxl = MD_SOURCE_DIR "/tests/golden/pipelines/sdxl";
// A 16×16 image whose right half is transparent.
const std::string kHalfTransparent = *from_base64(
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAYAAAAf8/9hAAAAHElEQVR42mPgEpH7TwAz4MMMowaMGjBqwHAxAAA5jLuBfoXq1wAA"
    "AABJRU5ErkJggg==");

class Interfaces : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder = new TemporaryFolder;
    make_folders(*folder / "loras");
    std::filesystem::copy_file(MD_SOURCE_DIR "/tests/golden/pipelines/lora_kohya.safetensors",
                               *folder / "loras/style.safetensors");
    server = new TestServer({kSd, kSdxl, "height=16", "width=16", "num_inference_steps=3", "warm_up=false",
                             "lora_dir=" + (*folder / "loras"), "max_pixels=4096", "max_steps=20", "max_images=4"});
  }
  static void TearDownTestSuite() {
    delete server;
    delete folder;
  }
  /// The file that `generate` writes for these words.
  std::string image_of_command(std::vector<std::string> words, const std::string& model = kSd) const {
    const std::string out = *folder / "out";
    std::filesystem::remove_all(out);
    words.insert(words.begin(),
                 {"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "pretrained_model_name_or_path=" + model,
                  "output_dir=" + out, "height=16", "width=16", "num_inference_steps=3"});
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return from_parameters(all_files(out));
  }
  /// Without the command's keys, which come first.
  static std::string from_parameters(const std::string& png) { return png.substr(png.find("iTXtparameters")); }
  static std::string image_file(int side, uint8_t shade) {
    HostArray rgb(Shape{DType::u8, {side, side, 3}});
    auto v = rgb.mutable_view<uint8_t>();
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<uint8_t>(shade + i * 7 % 97);
    return encode_png(rgb);
  }
  static std::string right_half(int side) {
    HostArray rgb(Shape{DType::u8, {side, side, 3}});
    auto v = rgb.mutable_view<uint8_t>();
    for (size_t i = 0; i < v.size(); ++i)
      v[i] = i / 3 % static_cast<size_t>(side) >= static_cast<size_t>(side) / 2 ? 255 : 0;
    return encode_png(rgb);
  }
  std::string written(const std::string& name, const std::string& bytes) const {
    write_file_atomic(*folder / name, bytes);
    return *folder / name;
  }
  inline static TemporaryFolder* folder = nullptr;
  inline static TestServer* server = nullptr;
};

TEST_F(Interfaces, OpenAiGenerationsAreTheCommandsImages) {
  Answer a = server->post("/v1/images/generations", {{"prompt", "a red heart"},
                                                     {"n", 2},
                                                     {"seed", 5},
                                                     {"response_format", "b64_json"},
                                                     {"negative_prompt", "grey"},
                                                     {"scheduler", "euler"},
                                                     {"unknown_field", 1}});
  ASSERT_EQ(a.status, 200) << a.body;
  ASSERT_EQ(a.value()["data"].size(), 2u);
  const std::vector<std::string> words = {"prompt=a red heart", "sample_seed=5", "negative_prompt=grey",
                                          "scheduler=euler", "num_images_per_prompt=2"};
  for (int i = 0; i < 2; ++i) {
    std::vector<std::string> one = words;
    one.push_back(fmt::format("only_image={}", i));
    EXPECT_TRUE(from_parameters(*from_base64(a.value()["data"][i]["b64_json"].get<std::string>())) ==
                image_of_command(one))
        << i;
  }
  EXPECT_EQ(a.value()["data"][0]["seed"], 5);
  EXPECT_EQ(a.value()["warnings"], json::array({"a field is ignored: unknown_field"}));

  // By URL, with the other model.
  a = server->post("/v1/images/generations",
                   {{"prompt", "a <lora:style:0.5> blue dog"}, {"model", "sdxl"}, {"size", "24x16"}, {"seed", 1}});
  ASSERT_EQ(a.status, 200) << a.body;
  const std::string url = a.value()["data"][0]["url"], base = fmt::format("http://127.0.0.1:{}", server->port());
  ASSERT_TRUE(url.starts_with(base + "/images/")) << url;
  const Answer image = server->get(url.substr(base.size()));
  EXPECT_EQ(image.status, 200);
  EXPECT_TRUE(contains(image.head, "Content-Type: image/png"));
  EXPECT_TRUE(from_parameters(image.body) ==
              image_of_command({"prompt=a <lora:style:0.5> blue dog", "lora_dir=" + (*folder / "loras"), "width=24",
                                "sample_seed=1", "guidance_scale=5"},
                               kSdxl));
  // Without the LoRA again.
  a = server->post(
      "/v1/images/generations",
      {{"prompt", "a  blue dog"}, {"model", "sdxl"}, {"size", "24x16"}, {"seed", 1}, {"response_format", "b64_json"}});
  EXPECT_TRUE(from_parameters(*from_base64(a.value()["data"][0]["b64_json"].get<std::string>())) ==
              image_of_command({"prompt=a  blue dog", "width=24", "sample_seed=1", "guidance_scale=5"}, kSdxl));
}

TEST_F(Interfaces, OpenAiEditsBeginWithTheImageAndReplaceWhatTheMaskShows) {
  const std::string photo = image_file(24, 60), mask = right_half(24);
  const std::vector<std::string> words = {"image=" + written("photo.png", photo), "prompt=a hat", "sample_seed=3",
                                          "height=null", "width=null"};
  Answer a = server->post_form(
      "/v1/images/edits", {{"prompt", "a hat"}, {"seed", "3"}, {"response_format", "b64_json"}, {"strength", "0.7"}},
      {{"image", photo}});
  ASSERT_EQ(a.status, 200) << a.body;
  const auto bytes = [&] { return from_parameters(*from_base64(a.value()["data"][0]["b64_json"].get<std::string>())); };
  std::vector<std::string> all = words;
  all.insert(all.end(), {"strength=0.7"});
  EXPECT_TRUE(bytes() == image_of_command(all));

  a = server->post_form("/v1/images/edits", {{"prompt", "a hat"}, {"seed", "3"}, {"response_format", "b64_json"}},
                        {{"image", photo}, {"mask", mask}});
  ASSERT_EQ(a.status, 200) << a.body;
  all = words;
  all.push_back("mask_image=" + written("mask.png", mask));
  const std::string masked = image_of_command(all);
  EXPECT_TRUE(bytes() == masked);
  // OpenAI's masks are transparent where the image is replaced.
  a = server->post_form("/v1/images/edits", {{"prompt", "a hat"}, {"seed", "3"}, {"response_format", "b64_json"}},
                        {{"image", photo}, {"mask", kHalfTransparent}});
  ASSERT_EQ(a.status, 200) << a.body;
  EXPECT_TRUE(bytes() == masked);
}

TEST_F(Interfaces, OpenAiErrorsHaveItsForm) {
  const auto refused = [&](const json& body, const std::string& part, int status = 400) {
    const Answer a = server->post("/v1/images/generations", body);
    EXPECT_EQ(a.status, status) << a.body;
    const json error = a.value()["error"];
    EXPECT_EQ(error["type"], "invalid_request_error");
    EXPECT_TRUE(contains(error["message"], part)) << error["message"];
  };
  refused({{"n", 1}}, "prompt is missing; expected a text");
  refused({{"prompt", 3}}, "prompt is 3; expected a text");
  refused({{"prompt", "x"}, {"n", 5}}, "num_images_per_prompt is 5; expected 1 to 4");
  refused({{"prompt", "x"}, {"n", 0}}, "num_images_per_prompt is 0; expected 1 to 4");
  refused({{"prompt", "x"}, {"n", 1.5}}, "n is 1.5; expected a whole number");
  refused({{"prompt", "x"}, {"size", "128x64"}}, "the size of the sample is 128x64; expected at most 4096 pixels");
  refused({{"prompt", "x"}, {"size", "-8x99999999999"}}, "");
  refused({{"prompt", "x"}, {"size", "big"}}, "size is 'big'; expected WIDTHxHEIGHT");
  refused({{"prompt", "x"}, {"num_inference_steps", 21}}, "num_inference_steps is 21; expected 1 to 20");
  refused({{"prompt", "x"}, {"model", "../sd"}}, "model is '../sd'; expected one of: sd");
  refused({{"prompt", "x"}, {"scheduler", "dpm_fast"}}, "dpm_fast");
  refused({{"prompt", "x"}, {"scheduler", "eulerr"}}, "expected one of: euler, ");
  refused({{"prompt", "x"}, {"guidance_scale", "high"}}, "guidance_scale");
  refused({{"prompt", std::string(9000, 'x')}}, "prompt has 9000 bytes; expected at most 8192");
  refused({{"prompt", "x"}, {"mask_blur", 1e9}}, "mask_blur");
  refused({{"prompt", "x"}, {"stream", true}}, "stream is true; expected false");
  EXPECT_EQ(server->post("/v1/images/generations", json::array()).status, 400);
  EXPECT_EQ(
      server->send(server->request("POST", "/v1/images/generations", "{\"prompt\"", {"Content-Type: application/json"}))
          .status,
      400);
  EXPECT_EQ(server->send(server->request("POST", "/v1/images/generations", "{}", {"Content-Type: text/plain"})).status,
            415);
  EXPECT_EQ(server->get("/v1/models/none").status, 404);
  EXPECT_EQ(server->get("/v1/images/generations").status, 404);
  EXPECT_EQ(server->get("/v1/models/sdxl").value()["id"], "sdxl");
  EXPECT_EQ(server->get("/v1/models").value()["data"].size(), 2u);
  EXPECT_EQ(server->post_form("/v1/images/edits", {{"prompt", "x"}}, {}).status, 400);
  const Answer a = server->post_form("/v1/images/edits", {{"prompt", "x"}}, {{"image", "no image"}});
  EXPECT_EQ(a.status, 400);
  EXPECT_TRUE(contains(a.value()["error"]["message"], "image: ")) << a.body;
}

TEST_F(Interfaces, A1111sImagesAreTheCommandsWithSeedsThatFollowEachOther) {
  const json request = {{"prompt", "a (red:1.3) heart"},
                        {"negative_prompt", "grey"},
                        {"seed", 7},
                        {"steps", 4},
                        {"cfg_scale", 3},
                        {"width", 16},
                        {"height", 24},
                        {"sampler_name", "DPM++ 2M"},
                        {"scheduler", "Karras"},
                        {"batch_size", 2},
                        {"restore_faces", true},
                        {"eta", 0},
                        {"save_images", false},
                        {"override_settings", {{"CLIP_stop_at_last_layers", 2}}}};
  const Answer a = server->post("/sdapi/v1/txt2img", request);
  ASSERT_EQ(a.status, 200) << a.body;
  ASSERT_EQ(a.value()["images"].size(), 2u);
  std::string second;
  for (int i = 0; i < 2; ++i) {
    second = *from_base64(a.value()["images"][i].get<std::string>());
    EXPECT_TRUE(
        from_parameters(second) ==
        image_of_command({"prompt=a (red:1.3) heart", "negative_prompt=grey", fmt::format("sample_seed={}", 7 + i),
                          "num_inference_steps=4", "guidance_scale=3", "height=24", "scheduler=dpmpp_2m",
                          "sigma_schedule=karras", "clip_skip=1", "prompt_syntax=a1111"}))
        << i;
  }
  const json info = parse_json_or_discard(a.value()["info"].get<std::string>());
  EXPECT_EQ(info["all_seeds"], (json{7, 8}));
  EXPECT_EQ(info["height"], 24);
  EXPECT_EQ(info["warnings"], json::array({"eta is ignored: samplers have the settings of their names",
                                           "restore_faces is ignored: this server has no such part of the web UI"}));
  EXPECT_TRUE(
      info["infotexts"][1].get<std::string>().starts_with("a (red:1.3) heart\nNegative prompt: grey\nSteps: 4, "
                                                          "Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: "
                                                          "3, Seed: 8, Size: 16x24, Model: sd, Clip skip: 2"))
      << info["infotexts"];
  EXPECT_EQ(a.value()["parameters"]["steps"], 4);
  const Answer read = server->post("/sdapi/v1/png-info", {{"image", "data:image/png;base64," + to_base64(second)}});
  EXPECT_EQ(read.value()["info"], info["infotexts"][1]);
  // Enlarged.
  const Answer large =
      server->post("/sdapi/v1/txt2img",
                   {{"prompt", "x"}, {"seed", 1}, {"enable_hr", true}, {"hr_scale", 2}, {"denoising_strength", 0.5}});
  ASSERT_EQ(large.status, 200) << large.body;
  EXPECT_TRUE(
      from_parameters(*from_base64(large.value()["images"][0].get<std::string>())) ==
      image_of_command({"prompt=x", "sample_seed=1", "hires_scale=2", "hires_strength=0.5", "prompt_syntax=a1111"}));
}

TEST_F(Interfaces, A1111sImagesBeginWithImagesAndMasks) {
  const std::string photo = image_file(16, 30), mask = right_half(16);
  json request = {{"prompt", "a hat"}, {"seed", 2}, {"init_images", {to_base64(photo)}}, {"denoising_strength", 0.6}};
  const std::vector<std::string> words = {"prompt=a hat", "sample_seed=2", "image=" + written("a.png", photo),
                                          "strength=0.6", "prompt_syntax=a1111"};
  Answer a = server->post("/sdapi/v1/img2img", request);
  ASSERT_EQ(a.status, 200) << a.body;
  EXPECT_TRUE(from_parameters(*from_base64(a.value()["images"][0].get<std::string>())) == image_of_command(words));
  request["mask"] = to_base64(mask), request["mask_blur"] = 0, request["inpainting_fill"] = 0;
  a = server->post("/sdapi/v1/img2img", request);
  ASSERT_EQ(a.status, 200) << a.body;
  std::vector<std::string> masked = words;
  masked.push_back("mask_image=" + written("m.png", mask));
  EXPECT_TRUE(from_parameters(*from_base64(a.value()["images"][0].get<std::string>())) == image_of_command(masked));
  EXPECT_TRUE(contains(a.value()["info"], "inpainting_fill is ignored")) << a.value()["info"];
  request["inpainting_mask_invert"] = 1;
  const Answer inverted = server->post("/sdapi/v1/img2img", request);
  EXPECT_NE(inverted.value()["images"], a.value()["images"]);
  EXPECT_EQ(server->post("/sdapi/v1/img2img", {{"prompt", "x"}}).status, 404);
}

TEST_F(Interfaces, A1111sListsAndOptions) {
  EXPECT_EQ(server->get("/sdapi/v1/sd-models").value()[1]["title"], "sdxl");
  EXPECT_EQ(server->get("/sdapi/v1/loras").value()[0]["name"], "style");
  EXPECT_EQ(server->get("/sdapi/v1/options").value()["sd_model_checkpoint"], "sd");
  EXPECT_EQ(server->post("/sdapi/v1/options", {{"sd_model_checkpoint", "sdxl"}, {"x", 1}}).value()["warnings"][0],
            "a field is ignored: x");
  EXPECT_EQ(server->get("/sdapi/v1/options").value()["sd_model_checkpoint"], "sdxl");
  EXPECT_EQ(server->post("/sdapi/v1/options", {{"sd_model_checkpoint", "sd"}}).status, 200);
  EXPECT_EQ(server->post("/sdapi/v1/options", {{"sd_model_checkpoint", "/etc/passwd"}}).status, 400);
  // Each listed sampler and spacing is accepted.
  const json samplers = server->get("/sdapi/v1/samplers").value(),
             schedulers = server->get("/sdapi/v1/schedulers").value();
  EXPECT_GT(samplers.size(), 10u);
  int refused = 0;
  for (const json& s : samplers)
    refused +=
        server->post("/sdapi/v1/txt2img", {{"prompt", "x"}, {"sampler_name", s["name"]}, {"steps", 5}}).status != 200;
  EXPECT_EQ(refused, 0);
  for (const json& s : schedulers)
    EXPECT_EQ(server
                  ->post("/sdapi/v1/txt2img",
                         {{"prompt", "x"}, {"sampler_name", "Euler"}, {"scheduler", s["label"]}, {"steps", 10}})
                  .status,
              200)
        << s;
  const Answer a = server->post("/sdapi/v1/txt2img", {{"prompt", "x"}, {"sampler_name", "nothing"}});
  EXPECT_EQ(a.status, 404);
  EXPECT_TRUE(contains(a.value()["detail"], "sampler_name is 'nothing'")) << a.body;
  EXPECT_EQ(server->get("/sdapi/v1/nothing").status, 404);
}

/// The data of the events with this name.
std::vector<json> events(const std::string& text, const std::string& name) {
  std::vector<json> out;
  const std::string head = "event: " + name + "\ndata: ";
  for (size_t at = 0; (at = text.find(head, at)) != text.npos;) {
    at += head.size();
    out.push_back(parse_json_or_discard(text.substr(at, text.find('\n', at) - at)));
  }
  return out;
}

TEST_F(Interfaces, ThePageGeneratesShowsProgressAndIsWhole) {
  const Answer page = server->get("/");
  EXPECT_EQ(page.status, 200);
  EXPECT_TRUE(page.body == read_file(MD_SOURCE_DIR "/maxdiffusion/server/page.html"));
  EXPECT_FALSE(contains(page.body, "//") && (contains(page.body, "src=\"http") || contains(page.body, "href=\"http")));
  EXPECT_TRUE(contains(page.head, "Content-Security-Policy: default-src 'none'"));
  EXPECT_EQ(server->get("/api/models").value()["models"][0]["multiple"], 2);

  const Answer made = server->post(
      "/api/generate",
      {{"prompt", "a star"}, {"images", 2}, {"sample_seed", 4}, {"num_inference_steps", 5}, {"width", 24}});
  ASSERT_EQ(made.status, 200) << made.body;
  const std::string id = made.value()["id"];
  const Answer job = server->get("/api/jobs/" + id);
  EXPECT_TRUE(contains(job.head, "Content-Type: text/event-stream")) << job.head;
  const std::vector<json> images = events(job.body, "image"), ends = events(job.body, "end");
  ASSERT_EQ(images.size(), 2u) << job.body;
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends[0]["error"], "");
  EXPECT_EQ(images[1]["seed"], 5);
  EXPECT_TRUE(from_parameters(server->get(images[1]["url"]).body) ==
              image_of_command({"prompt=a star", "sample_seed=5", "num_inference_steps=5", "width=24"}));
  EXPECT_EQ(server->get("/api/jobs/" + id).status, 404);
  EXPECT_EQ(server->get("/images/../../etc/passwd").status, 404);
  EXPECT_EQ(server->post("/api/generate", {{"prompt", "x"}, {"images", 5}}).value()["error"],
            "5 images are requested; expected 1 to 4, the server's max_images");
}

}  // namespace
}  // namespace md
