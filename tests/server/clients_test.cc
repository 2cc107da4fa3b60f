// Many clients, slow ones, hostile ones, and the server's shutdown.
#include <atomic>
#include <filesystem>
#include <random>
#include <set>

#include "maxdiffusion/base/base64.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/media/image.h"
#include "tests/cli/command.h"
#include "tests/fuzz/mutate.h"
#include "tests/server/server.h"

namespace md {
namespace {

const std::string kSd = MD_SOURCE_DIR "/tests/golden/pipelines/sd";
using Words = std::vector<std::string>;

Words tiny(Words words = {}) {
  words.insert(words.begin(),
               {kSd, "height=16", "width=16", "num_inference_steps=2", "warm_up=false", "scheduler=euler"});
  return words;
}
/// A request that takes seconds.
json long_one() {
  return {
      {"prompt", "long"}, {"num_inference_steps", 900}, {"width", 64}, {"height", 64}, {"response_format", "b64_json"}};
}
const char* kGenerations = "/v1/images/generations";

/// Waits until `is` returns true, at most twenty seconds.
bool soon(const std::function<bool()>& is) {
  for (int i = 0; i < 400; ++i) {
    if (is()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return false;
}
bool is_busy(const TestServer& server) {
  return server.get("/sdapi/v1/progress").value()["state"]["sampling_step"].get<int>() > 2;
}
int waiting(const TestServer& server) {
  return server.get("/sdapi/v1/progress").value()["state"]["job_count"].get<int>();
}

TEST(ServerAccess, NeedsTheKeyWhichIsNeverLogged) {
  const std::string key = "correct-horse-battery";
  const Words by_keys = tiny({"api_key=" + key});
  for (const bool by_environment : {false, true}) {
    TestServer server(by_environment ? tiny() : by_keys,
                      by_environment ? Words{"MAXDIFFUSION_API_KEY=" + key} : Words{});
    EXPECT_EQ(server.get("/v1/models").status, 401);
    EXPECT_EQ(server.get("/v1/models", {"Authorization: Bearer wrong"}).status, 401);
    EXPECT_EQ(server.get("/v1/models", {"Authorization: Bearer " + key + "x"}).status, 401);
    EXPECT_EQ(server.get("/v1/models", {"Authorization: Bearer "}).status, 401);
    EXPECT_EQ(server.get("/v1/models").value()["error"]["type"], "authentication_error");
    EXPECT_EQ(server.get("/v1/models").value()["error"]["message"],
              "no API key is given; expected it as a bearer token or in X-API-Key");
    EXPECT_EQ(server.get("/sdapi/v1/options").status, 401);
    EXPECT_EQ(server.get("/api/models").status, 401);
    EXPECT_EQ(server.post(kGenerations, {{"prompt", "x"}}).status, 401);
    EXPECT_EQ(server.get("/").status, 200);
    EXPECT_EQ(server.get("/v1/models", {"Authorization: Bearer " + key}).status, 200);
    EXPECT_EQ(server.get("/v1/models", {"X-API-Key: " + key}).status, 200);
    EXPECT_FALSE(contains(server.log(), key)) << server.log();
    server.signal(SIGTERM);
    EXPECT_EQ(server.wait(), 0);
  }
}

TEST(ServerAccess, PagesOfOtherPlacesAreRefused) {
  const TestServer server(tiny());
  EXPECT_EQ(server.get("/v1/models", {"Host: evil.example"}).status, 403);
  EXPECT_EQ(server.get("/", {"Host: evil.example:7860"}).status, 403);
  for (const char* host : {"127.evil.example", "127.0.0.1.evil.example:7860", "127.0.0.1x", "127.1", "128.0.0.1", "0",
                           "localhost:80@evil.example", "127.0.0.1:x"})
    EXPECT_EQ(server.get("/v1/models", {fmt::format("Host: {}", host)}).status, 403) << host;
  EXPECT_EQ(server.get("/v1/models", {"Origin: http://127.evil.example"}).status, 403);
  for (const char* host : {"localhost:1", "LocalHost:80", "127.0.0.1", "127.8.9.10:80", "[::1]:80"})
    EXPECT_EQ(server.get("/v1/models", {fmt::format("Host: {}", host)}).status, 200) << host;
  // JSON of 100,000 levels is refused, and the server goes on.
  const std::string deep(100'000, '[');
  for (const char* path : {"/v1/images/generations", "/sdapi/v1/txt2img"})
    EXPECT_EQ(server.send(server.request("POST", path, deep, {"Content-Type: application/json"})).status, 400) << path;
  EXPECT_EQ(server.get("/v1/models", {"Origin: https://evil.example"}).status, 403);
  EXPECT_EQ(server.get("/v1/models", {"Origin: null"}).status, 403);
  EXPECT_EQ(server.get("/v1/models", {fmt::format("Origin: http://127.0.0.1:{}", server.port())}).status, 200);
  // A request that a web page can send without a CORS preflight.
  EXPECT_EQ(server.send(server.request("POST", "/sdapi/v1/txt2img", R"({"prompt": "x"})", {"Content-Type: text/plain"}))
                .status,
            415);
  EXPECT_EQ(server.send(server.request("POST", "/sdapi/v1/options", "{}", {"Content-Type: Application/JSON"})).status,
            200);
}

TEST(ServerStart, WordsThatCannotBeAreRefused) {
  Outcome o = maxdiffusion({"serve"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "the model is missing; expected a folder, a file, a run or a config")) << o.err;
  o = maxdiffusion({"serve", kSd, "port=70000"});
  EXPECT_EQ(o.status, 2);
  o = maxdiffusion({"serve", kSd, "learning_rat=1"});
  EXPECT_EQ(o.status, 2);
  o = maxdiffusion({"serve", kSd, kSd + "/", "port=0"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "two models are called 'sd'")) << o.err;
  o = maxdiffusion({"serve", MD_SOURCE_DIR "/tests/golden/wan/t2v", "port=0"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "'t2v' is a model of videos")) << o.err;
  o = maxdiffusion({"serve", kSd, "host=300.1.1.1"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "host is '300.1.1.1'; expected an address or a name of this machine")) << o.err;
  for (const std::string origin : {"*", "localhost:5001", "http://localhost:5001/", "http://", "null"}) {
    o = maxdiffusion({"serve", kSd, "port=0", "warm_up=false", "allowed_origins=" + origin});
    EXPECT_EQ(o.status, 2) << origin;
    EXPECT_TRUE(contains(o.err, "allowed_origins has '" + origin + "'; expected origins")) << o.err;
  }
  o = maxdiffusion({"serve", "runs=" + kSd, "hf_access_token=hunter2"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "hf_access_token is given without a model")) << o.err;
  EXPECT_FALSE(contains(o.err, "hunter2")) << o.err;
  const TestServer server(tiny());
  o = maxdiffusion({"serve", kSd, fmt::format("port={}", server.port())});
  EXPECT_EQ(o.status, 4);
  EXPECT_TRUE(contains(o.err, fmt::format("port {} of 127.0.0.1 cannot be bound", server.port()))) << o.err;
}

TEST(ServerLimits, HoldForQueuesAndBodies) {
  const TestServer server(tiny({"max_queue=1", "max_steps=900", "max_body_mb=1"}));
  std::vector<std::jthread> threads;
  Answer first, second;
  threads.emplace_back([&] { first = server.post(kGenerations, long_one()); });
  ASSERT_TRUE(soon([&] { return is_busy(server); }));
  threads.emplace_back([&] { second = server.post(kGenerations, {{"prompt", "x"}}); });
  ASSERT_TRUE(soon([&] { return waiting(server) == 2; }));
  const Answer third = server.post(kGenerations, {{"prompt", "x"}});
  EXPECT_EQ(third.status, 429) << third.body;
  EXPECT_TRUE(contains(third.head, "Retry-After: ")) << third.head;
  EXPECT_EQ(third.value()["error"]["type"], "rate_limit_error");
  EXPECT_EQ(server.post("/sdapi/v1/interrupt", json::object()).status, 200);
  for (std::jthread& t : threads) t.join();
  EXPECT_EQ(first.status, 409) << first.body;
  EXPECT_TRUE(contains(first.body, "interrupted"));
  EXPECT_EQ(second.status, 200) << second.body;

  const std::string large(size_t{3} << 20, 'x');
  const json body = {{"prompt", large}};
  EXPECT_EQ(server.post(kGenerations, body).status, 413);
  std::string chunked =
      server.request("POST", kGenerations, "", {"Content-Type: application/json", "Transfer-Encoding: chunked"});
  for (size_t i = 0; i < 3; ++i) chunked += "100000\r\n" + std::string(0x100000, 'x') + "\r\n";
  EXPECT_EQ(server.send(chunked + "0\r\n\r\n").status, 413);
  EXPECT_EQ(server.post_form("/v1/images/edits", {{"prompt", "x"}}, {{"image", large}}).status, 413);
  EXPECT_EQ(server.get("/" + std::string(4000, 'a')).status, 414);
  EXPECT_NE(server.get("/v1/models", {"X-Long: " + std::string(100'000, 'a')}).status, 200);
  EXPECT_EQ(server.get("/v1/models").status, 200);
}

TEST(ServerPreviews, AreSentWhileTheImageIsGenerated) {
  const TestServer server(tiny({"max_steps=900", "preview_every=2"}));
  const auto is_image = [](const std::string& png, int64_t side) {
    const DecodedImage image = decode_stored_image(png.data(), png.size(), "preview", {});
    return image.rgb.dims() == Dims{side, side, 3};
  };
  const json job = {{"prompt", "x"}, {"num_inference_steps", 900}, {"width", 64}, {"height", 64}};
  EXPECT_TRUE(server.get("/sdapi/v1/progress").value()["current_image"].is_null());
  const std::string id = server.post("/api/generate", job).value()["id"];
  std::string text;
  std::jthread reader([&] { text = server.get("/api/jobs/" + id).body; });
  json progress;
  EXPECT_TRUE(soon([&] {
    progress = server.get("/sdapi/v1/progress").value();
    return progress["current_image"].is_string();
  }));
  EXPECT_TRUE(server.get("/sdapi/v1/progress?skip_current_image=true").value()["current_image"].is_null());
  EXPECT_EQ(server.send(server.request("DELETE", "/api/jobs/" + id)).status, 200);
  reader.join();
  EXPECT_TRUE(is_image(from_base64(progress["current_image"].get<std::string>()).value_or(""), 32));  // of cells
  const std::string head = R"(data: {"image":0,"url":"data:image/png;base64,)";
  const size_t at = text.find("event: preview\n" + head);
  ASSERT_NE(at, text.npos) << text.substr(0, 500);
  const size_t from = at + 15 + head.size();
  EXPECT_TRUE(is_image(from_base64(text.substr(from, text.find('"', from) - from)).value_or(""), 32));
  // Ended: there is no more.
  EXPECT_TRUE(soon([&] { return !is_busy(server); }));
  EXPECT_TRUE(server.get("/sdapi/v1/progress").value()["current_image"].is_null());
}

TEST(ServerCancel, EndsBetweenStepsAndWhereAClientLeaves) {
  const TestServer server(tiny({"max_steps=900"}));
  // Cancelled through the page.
  const json job = {{"prompt", "x"}, {"num_inference_steps", 900}, {"width", 64}, {"height", 64}};
  const std::string id = server.post("/api/generate", job).value()["id"];
  std::string text;
  std::jthread reader([&] { text = server.get("/api/jobs/" + id).body; });
  ASSERT_TRUE(soon([&] { return is_busy(server); }));
  EXPECT_EQ(server.send(server.request("DELETE", "/api/jobs/" + id)).status, 200);
  reader.join();
  EXPECT_TRUE(contains(text, "event: progress\n")) << text;
  EXPECT_TRUE(contains(text, R"("error":"cancelled")"))
      << text.substr(text.size() - std::min<size_t>(text.size(), 300));
  EXPECT_FALSE(contains(server.log(), "1 image in ")) << "all steps have run";
  // A client that disconnects while its request runs, and while it waits.
  for (const char* path : {kGenerations, "/sdapi/v1/txt2img"}) {
    json request = long_one();
    request["steps"] = 900;
    const std::string bytes = server.request("POST", path, request.dump(), {"Content-Type: application/json"});
    Client running(server.port()), waits(server.port());
    running.send(bytes);
    ASSERT_TRUE(soon([&] { return is_busy(server); }));
    waits.send(bytes);
    ASSERT_TRUE(soon([&] { return waiting(server) == 2; }));
    waits.close();
    EXPECT_TRUE(soon([&] { return waiting(server) == 1; }));
    running.close();
    EXPECT_TRUE(soon([&] { return waiting(server) == 0; }));
  }
  EXPECT_EQ(server.post(kGenerations, {{"prompt", "x"}}).status, 200);
}

TEST(ServerClients, SlowOnesHoldNoOtherUp) {
  const TestServer server(tiny());
  const std::string bytes =
      server.request("POST", kGenerations, R"({"prompt": "slow", "seed": 1, "response_format": "b64_json"})",
                     {"Content-Type: application/json"});
  std::vector<std::unique_ptr<Client>> silent;
  for (int i = 0; i < 20; ++i) {
    silent.push_back(std::make_unique<Client>(server.port()));
    silent.back()->send(bytes.substr(0, 20));
  }
  Client slow(server.port());
  std::string answer;
  std::jthread sends([&] {
    for (const char c : bytes) {
      slow.send({&c, 1});
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    for (std::string part; !(part = slow.receive(64)).empty();
         std::this_thread::sleep_for(std::chrono::milliseconds(1)))
      answer += part;
  });
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 5; ++i) EXPECT_EQ(server.get("/v1/models").status, 200);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  sends.join();
  EXPECT_EQ(answer_of(answer).status, 200);
  EXPECT_EQ(answer_of(answer).value()["data"].size(), 1u);
}

TEST(ServerEnd, AnswersWhatWaitsAndEndsWithoutError) {
  for (const int signal : {SIGTERM, SIGINT}) {
    TestServer server(tiny({"max_steps=900"}));
    std::vector<Answer> received(4);
    std::vector<std::jthread> threads;
    for (Answer& a : received) threads.emplace_back([&] { a = server.post(kGenerations, long_one()); });
    Client silent(server.port());
    silent.send("GET /");
    ASSERT_TRUE(soon([&] { return is_busy(server) && waiting(server) == 4; }));
    const auto start = std::chrono::steady_clock::now();
    server.signal(signal);
    for (std::jthread& t : threads) t.join();
    for (const Answer& a : received) {
      EXPECT_EQ(a.status, 503) << a.body;
      EXPECT_TRUE(contains(a.body, "the server stops")) << a.body;
    }
    EXPECT_EQ(server.wait(), 0) << server.log();
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(6));
  }
}

/// MD_SERVER_LOAD=1000: number of requests, sent by 64 clients.
TEST(ServerLoad, OfManyClientsNoRequestIsLostAndEachGetsItsOwnImage) {
  const char* load = std::getenv("MD_SERVER_LOAD");
  const int requests = load ? std::atoi(load) : 96, clients = load ? 64 : 16, seeds = 8;
  for (const bool together : {false, true}) {
    TestServer server(tiny({together ? "per_device_batch_size=4" : "per_device_batch_size=1", "max_steps=900"}));
    std::vector<std::string> expected;
    const auto request = [&](int seed) -> json {
      return {{"prompt", fmt::format("number {}", seed)}, {"seed", seed}, {"response_format", "b64_json"}};
    };
    for (int seed = 0; seed < seeds; ++seed)
      expected.push_back(server.post(kGenerations, request(seed)).value()["data"][0]["b64_json"]);
    EXPECT_EQ(std::set(expected.begin(), expected.end()).size(), static_cast<size_t>(seeds));
    std::atomic<int> next = 0, right = 0, wrong = 0, left = 0;
    double early_mb = 0;
    std::vector<std::jthread> threads;
    const auto start = std::chrono::steady_clock::now();
    for (int c = 0; c < clients; ++c)
      threads.emplace_back([&, c] {
        std::mt19937 random(static_cast<unsigned>(c));
        for (int i; (i = next++) < requests;) {
          if (i == requests / 4) early_mb = server.resident_mb();
          const int seed = i % seeds;
          if (random() % 16 == 0) {  // one more, whose client disconnects
            const Client leaves(server.port());
            leaves.send(server.request("POST", kGenerations, request(seed).dump(), {"Content-Type: application/json"}));
            std::this_thread::sleep_for(std::chrono::milliseconds(random() % 30));
            ++left;
          }
          const Answer a = server.post(kGenerations, request(seed));
          const bool is_its_own =
              a.status == 200 && a.value()["data"][0]["b64_json"] == expected[static_cast<size_t>(seed)];
          if (!is_its_own && wrong++ == 0) ADD_FAILURE() << a.status << " " << a.body.substr(0, 300);
          right += is_its_own;
        }
      });
    for (std::jthread& t : threads) t.join();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    EXPECT_EQ(right, requests);
    EXPECT_EQ(contains(server.log(), "4 requests together"), together) << server.log();
    const double late_mb = server.resident_mb();
    fmt::print(
        "{}{} requests of {} clients, {} left: {:.1f} s; resident {:.0f} MB after a quarter, {:.0f} MB at the end\n",
        requests, together ? " batched" : "", clients, left.load(), seconds, early_mb, late_mb);
#if !defined(__SANITIZE_THREAD__)  // its shadow memory is resident too
    EXPECT_LT(late_mb, 1.25 * early_mb + 20);
#endif
    server.signal(SIGTERM);
    EXPECT_EQ(server.wait(), 0);
  }
}

TEST(ServerLoras, OfAnotherModelAreLeftOutWithAWarningInEachAnswerOrRefused) {
  const TemporaryFolder t;
  make_folders(t / "loras");
  HostArrays lora = SafetensorsReader::open(MD_SOURCE_DIR "/tests/golden/pipelines/lora_kohya.safetensors").tensors();
  const size_t known = lora.size();
  lora["lora_unet_mid_block_gate.alpha"] = lora.begin()->second;
  write_safetensors(t / "loras/more.safetensors", lora);
  const std::string text = fmt::format("1 of {} keys have no place in this model", known + 1);
  const json request = {{"prompt", "a <lora:more:1>"}};
  for (const char* value : {"error", "warn"}) {
    const TestServer server({MD_SOURCE_DIR "/tests/golden/pipelines/sdxl", "height=16", "width=16",
                             "num_inference_steps=2", "warm_up=false", "lora_dir=" + (t / "loras"),
                             std::string("lora_missing_keys=") + value});
    for (int i = 0; i < 2; ++i) {  // the second request keeps the weights
      const Answer a = server.post(kGenerations, request);
      EXPECT_FALSE(contains(a.body, t.path())) << a.body;
      if (value == std::string("error")) {
        EXPECT_EQ(a.status, 400);
        EXPECT_TRUE(
            contains(a.body, "prompt: a LoRA file that it names does not fit 'sdxl': LoRA 'more.safetensors': " + text))
            << a.body;
      } else {
        ASSERT_EQ(a.status, 200) << a.body;
        ASSERT_EQ(a.value()["warnings"].size(), 1u) << a.body;
        EXPECT_EQ(a.value()["warnings"][0],
                  "LoRA 'more.safetensors': " + text + " and are left out: lora_unet_mid_block_gate.alpha");
      }
    }
    EXPECT_FALSE(server.post(kGenerations, {{"prompt", "a"}}).value().contains("warnings"));
  }
}

TEST(ServerPaths, NamesOfLorasAndModelsLeaveNoFolder) {
  const TemporaryFolder t;
  make_folders(t / "loras/below");
  const std::string lora = MD_SOURCE_DIR "/tests/golden/pipelines/lora_kohya.safetensors";
  for (const char* place : {"loras/in.safetensors", "loras/below/deep.safetensors", "secret.safetensors"})
    std::filesystem::copy_file(lora, t / place);
  const TestServer server({MD_SOURCE_DIR "/tests/golden/pipelines/sdxl", kSd, "height=16", "width=16",
                           "num_inference_steps=2", "warm_up=false", "lora_dir=" + (t / "loras")});
  const auto status = [&](const std::string& lora_name, const std::string& model = "") {
    json request = {{"prompt", "a <lora:" + lora_name + ":1>"}};
    if (!model.empty()) request["model"] = model;
    const Answer a = server.post(kGenerations, request);
    EXPECT_TRUE(contains(lora_name, t.path()) || !contains(a.body, t.path())) << a.body;
    return a.status;
  };
  EXPECT_EQ(status("in"), 200);
  EXPECT_EQ(status("deep"), 200);
  EXPECT_EQ(status("below/deep"), 200);
  // A LoRA that does not fit is the client's error, and does not affect the next request.
  EXPECT_EQ(status("in", "sd"), 400);
  EXPECT_EQ(server.post(kGenerations, {{"prompt", "x"}, {"model", "sd"}}).status, 200);
  for (const std::string& name :
       {std::string("../secret"), std::string("..\\secret"), std::string("below/../../secret"), std::string("/secret"),
        t / "secret", t / "secret.safetensors", std::string("%2e%2e/secret"), std::string("..%2fsecret"),
        std::string("in/../../secret"), std::string("./../secret"), std::string("in\0/../../secret", 16),
        std::string("secret"), std::string("file://") + (t / "secret"), std::string(), std::string("."),
        std::string(".."), std::string("~"), std::string("https://x.example/a")})
    EXPECT_EQ(status(name), 400) << name;
  for (const std::string& model :
       {std::string("../sd"), kSd, std::string("/etc/passwd"), std::string("sd/../sd"), std::string("sd\0x", 4),
        std::string("runwayml/stable-diffusion-v1-5"), std::string("http://x.example/a")})
    EXPECT_EQ(status("in", model), 400) << model;
  for (const std::string path :
       {"/../../../../etc/passwd", "/images/../../../etc/passwd", "/images/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd",
        "/images//etc/passwd", "/%00", "/images/.png", "/v1/models/../../etc/passwd"}) {
    const Answer a = server.get(path);
    EXPECT_EQ(a.status, 404) << path;
    EXPECT_FALSE(contains(a.body, "root:")) << path;
  }
  // Requests cannot set keys that read files.
  const Answer a = server.post(kGenerations, {{"prompt", "x"},
                                              {"image", "/etc/passwd"},
                                              {"mask_image", "/etc/passwd"},
                                              {"latents", "/etc/passwd"},
                                              {"lora_files", {t / "secret.safetensors"}},
                                              {"lora_dir", t.path()},
                                              {"prompt_file", "/etc/passwd"},
                                              {"diffusion_scheduler_config", {{"num_train_timesteps", 1000000000}}}});
  EXPECT_EQ(a.status, 200) << a.body;
  EXPECT_EQ(
      a.value()["warnings"][0],
      "fields are ignored: diffusion_scheduler_config, image, latents, lora_dir, lora_files, mask_image, prompt_file");
  EXPECT_FALSE(contains(server.log(), "secret.safetensors with scale")) << server.log();
}

/// MD_SERVER_FUZZ=20000: number of requests.
TEST(ServerFuzz, DamagedRequestsAreAnsweredOrClosedAndHarmNone) {
  const char* rounds = std::getenv("MD_SERVER_FUZZ");
  const int requests = rounds ? std::atoi(rounds) : 200;
  TestServer server(tiny({"max_steps=8", "max_pixels=1024", "max_images=2", "max_body_mb=1"}));
  HostArray rgb(Shape{DType::u8, {16, 16, 3}});
  const std::string small = encode_png(rgb);
  const std::string json_type = "Content-Type: application/json";
  std::vector<std::string> whole = {
      server.request(
          "POST", kGenerations,
          R"({"prompt": "a (red:1.2) heart <lora:x:1>", "n": 1, "size": "16x16", "seed": 3, "guidance_interval": [0.1, 0.9], "outpaint": [1, 2, 3, 4], "original_size": [16, 16], "hires_scale": 1.5, "strength": 0.5, "prompt_syntax": "a1111", "scheduler": "dpmpp_2m", "num_inference_steps": 2, "clip_skip": 1})",
          {json_type}),
      server.request(
          "POST", "/sdapi/v1/txt2img",
          R"({"prompt": "x", "steps": 2, "width": 16, "height": 16, "sampler_name": "Euler a", "batch_size": 2, "override_settings": {"sd_model_checkpoint": "sd"}})",
          {json_type}),
      server.request("POST", "/sdapi/v1/img2img",
                     json{{"prompt", "x"},
                          {"steps", 4},
                          {"init_images", {to_base64(small)}},
                          {"mask", to_base64(small)},
                          {"mask_blur", 2},
                          {"inpaint_full_res", true},
                          {"denoising_strength", 0.5}}
                         .dump(),
                     {json_type}),
      server.request(
          "POST", "/api/generate",
          json{
              {"prompt", "x"}, {"image", "data:image/png;base64," + to_base64(small)}, {"images", 2}, {"strength", 0.9}}
              .dump(),
          {json_type}),
      server.request("POST", "/v1/images/edits",
                     "--b\r\nContent-Disposition: form-data; name=\"prompt\"\r\n\r\nx\r\n--b\r\nContent-Disposition: "
                     "form-data; name=\"image\"; "
                     "filename=\"a.png\"\r\nContent-Type: image/png\r\n\r\n" +
                         small + "\r\n--b--\r\n",
                     {"Content-Type: multipart/form-data; boundary=b"}),
      server.request("GET", "/v1/models?x=%41&y", "", {"Range: bytes=0-10,5-7", "Accept-Encoding: gzip, br"}),
      server.request("POST", "/sdapi/v1/options", R"({"sd_model_checkpoint": "sd", "CLIP_stop_at_last_layers": 1})",
                     {json_type, "Expect: 100-continue"}),
      server.request("POST", "/sdapi/v1/png-info", json{{"image", to_base64(small)}}.dump(),
                     {json_type, "Content-Encoding: gzip"}),
      "POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: "
      "chunked\r\n\r\n10\r\n{\"prompt\": \"xy\"}\r\n0\r\n\r\n",
  };
  Random random(7);
  std::map<int, int> statuses;
  for (int i = 0; i < requests && server.runs(); ++i) {
    const std::string& its = whole[random() % whole.size()];
    const size_t head = its.find("\r\n\r\n") + 4;
    std::string bytes;
    switch (random() % 3) {
      case 0: bytes = damaged(its, random); break;
      case 1: {  // only the body, with its length
        bytes = damaged(its.substr(head), random);
        std::string start = its.substr(0, head);
        if (const size_t at = start.find("Content-Length: "); at != start.npos)
          start.replace(at, start.find("\r\n", at) - at, fmt::format("Content-Length: {}", bytes.size()));
        bytes = start + bytes;
        break;
      }
      default: bytes = damaged(its.substr(0, head), random) + its.substr(head);
    }
    const Client client(server.port());
    client.send(bytes);
    pollfd answered{.fd = client.socket(), .events = POLLIN, .revents = 0};
    ::poll(&answered, 1, 400);  // else it waits for the missing part
    ::shutdown(client.socket(), SHUT_WR);
    const Answer a = answer_of(client.rest());
    ++statuses[a.status];
    EXPECT_NE(a.status, 500) << bytes.substr(0, 2000) << "\n→ " << a.body << server.log();
  }
  std::string text;
  for (const auto& [status, n] : statuses) text += fmt::format(" {}: {}", status, n);
  fmt::print("{} damaged requests, answered{}\n", requests, text);
  ASSERT_TRUE(server.runs()) << server.log();
  EXPECT_EQ(server.post(kGenerations, {{"prompt", "x"}}).status, 200);
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
}

}  // namespace
}  // namespace md
