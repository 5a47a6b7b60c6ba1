// The control server over its real socket: what it tells, to whom, and that no peer can hurt it.
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/support/control_scene.h"

using nlohmann::json;

namespace {

std::set<std::string> Names(const json& object) {
  std::set<std::string> names;
  for (const auto& [name, value] : object.items()) names.insert(name);
  return names;
}

int ErrorOf(const json& reply) {
  INFO(reply.dump());
  REQUIRE(reply.contains("error"));
  CHECK(reply["jsonrpc"] == "2.0");
  CHECK(reply["error"]["message"].is_string());
  CHECK_FALSE(reply.contains("result"));
  return reply["error"]["code"];
}

bool Root() {
  if (::geteuid() == 0) return true;
  WARN("skipped: peers of another uid need root");
  return false;
}

}  // namespace

TEST_CASE("ControlServer.StatusHasTheNamesOthersRead") {
  ControlScene scene;
  scene.Start();
  RawPeer peer(scene.options.path);
  const json reply = peer.Ask(R"({"jsonrpc":"2.0","id":"x","method":"status"})");
  CHECK(reply["id"] == "x");
  const json& status = reply["result"];
  CHECK(Names(status) == std::set<std::string>{"state",
                                               "version",
                                               "node",
                                               "socket",
                                               "pid",
                                               "uptime_s",
                                               "adam_target",
                                               "adam_workers",
                                               "workers_busy_s",
                                               "protocol_errors",
                                               "lost_wakeups",
                                               "log_lines_dropped",
                                               "arenas_bytes",
                                               "arenas_limit_bytes",
                                               "totals",
                                               "steps",
                                               "sessions",
                                               "quotas",
                                               "checkpoints",
                                               "paths",
                                               "pool"});
  CHECK(status["state"] == "ready");
  CHECK(status["uptime_s"] == 12.5);
  CHECK(status["arenas_limit_bytes"] == 1ull << 40);
  const json& session = status["sessions"].at(0);
  for (const char* name : {"job", "rank", "pid", "uid", "epoch", "parameters", "skipped_steps"})
    CHECK(session.contains(name));
  CHECK(session["job"] == "mine");
  CHECK(session["rank"] == 1);
  CHECK(session["epoch"] == 42);
  CHECK(session["parameters"] == 268000000);
  CHECK(session["skipped_steps"] == 4);
  const json& path = status["paths"].at(0);
  for (const char* name : {"name", "directory", "state", "read_bytes", "written_bytes", "read_bytes_per_s",
                           "write_bytes_per_s", "scratch_bytes", "checkpoint_bytes", "direct_io", "engine"})
    CHECK(path.contains(name));
  CHECK(path["read_bytes"] == 1ull << 41);
  CHECK(path["direct_io"] == true);
  CHECK(path["write_bytes_per_s"] == 1.5);
  for (const char* name : {"bytes", "cached_blocks", "dirty_blocks", "free_blocks"})
    CHECK(status["pool"].contains(name));
  CHECK(status["pool"]["free_blocks"] == 6);
  CHECK(status["totals"]["parameters"] == 268001000);
}

TEST_CASE("ControlServer.StepsSayWhereTheTimeWent") {
  ControlScene scene;
  mlpo::StepRecord step;
  step.number = 9;
  step.epoch = 8;
  step.began_ns = 1'000'000'000;
  step.ended_ns = 3'500'000'000;
  step.period_ns = 4'000'000'000;
  step.parts_ns = {1'000'000'000, 2'000'000, 900'000'000, 98'000'000, 300'000'000, 200'000'000};
  step.blocks = 12;
  step.cached_blocks = 5;
  step.prefetched_blocks = 4;
  step.read_blocks = 3;
  step.paths = {{36, 24, 1'500'000'000, 500'000'000, 1'750'000'000}};
  scene.snapshot.taken_ns = 5'000'000'000;
  scene.snapshot.sessions[0].steps = {step, step};
  scene.snapshot.sessions[0].steps[1].number = 10;
  scene.snapshot.steps.ended = 77;
  scene.snapshot.paths[0].busy_ns = 2'500'000'000;
  scene.Start();
  RawPeer peer(scene.options.path);
  const json status = peer.Call("status")["result"];
  CHECK(status["steps"]["ended"] == 77);
  CHECK(status["paths"].at(0)["busy_s"] == 2.5);
  const json& session = status["sessions"].at(0);
  CHECK(session["step"].is_null());
  REQUIRE(session["steps"].size() == 2);
  CHECK(session["last_step"] == session["steps"].at(1));
  CHECK(session["last_step"]["number"] == 10);
  const json& told = session["steps"].at(0);
  CHECK(told["ago_s"] == 1.5);
  CHECK(told["time_s"] == 2.5);
  CHECK(told["period_s"] == 4.0);
  double sum = 0;
  for (const char* part : {"adam_s", "copy_s", "fetch_wait_s", "flush_wait_s", "grad_s", "idle_s"})
    sum += told[part].get<double>();
  CHECK(std::abs(sum - 2.5) < 1e-9);
  CHECK(told["fetch_wait_s"] == 0.9);
  CHECK(told["cached_blocks"] == 5);
  CHECK(told["paths"] == json::parse(R"([{"name":"nvme","read_bytes":36,"written_bytes":24,"read_busy_s":1.5,
                                         "write_busy_s":0.5,"busy_s":1.75}])"));
  CHECK(status["sessions"].at(1)["last_step"].is_null());
}

TEST_CASE("ControlServer.OtherMethods") {
  ControlScene scene;
  scene.Start();
  RawPeer peer(scene.options.path);
  CHECK(peer.Call("sessions")["result"]["sessions"].size() == 2);
  CHECK(peer.Call("sessions")["result"]["state"] == "ready");
  CHECK(peer.Call("paths")["result"]["paths"].at(0)["name"] == "nvme");
  const json version = peer.Call("version")["result"];
  CHECK(version["version"] == "0.1.0");
  CHECK(version["abi_major"].is_number());
  CHECK(scene.drains == 0);
  CHECK(peer.Call("drain")["result"]["state"] == "draining");
  CHECK(peer.Call("status")["result"]["state"] == "draining");
  CHECK(scene.drains == 1);
}

TEST_CASE("ControlServer.JsonRpcErrors") {
  ControlScene scene;
  scene.Start();
  RawPeer peer(scene.options.path);
  CHECK(ErrorOf(peer.Ask("{")) == -32700);
  CHECK(ErrorOf(peer.Ask("")) == -32700);
  CHECK(ErrorOf(peer.Ask("\x01\xff\xfe")) == -32700);
  CHECK(ErrorOf(peer.Ask(R"({"jsonrpc":"2.0","id":1,"method":"stat)"
                         "\xff"
                         R"("})")) == -32700);
  CHECK(ErrorOf(peer.Ask("1e999")) == -32700);
  CHECK(ErrorOf(peer.Ask("[]")) == -32600);
  CHECK(ErrorOf(peer.Ask("42")) == -32600);
  CHECK(ErrorOf(peer.Ask("{}")) == -32600);
  CHECK(ErrorOf(peer.Ask(R"({"jsonrpc":"1.0","id":1,"method":"status"})")) == -32600);
  CHECK(ErrorOf(peer.Ask(R"({"jsonrpc":2.0,"id":1,"method":"status"})")) == -32600);
  CHECK(ErrorOf(peer.Ask(R"({"jsonrpc":"2.0","id":1,"method":7})")) == -32600);
  CHECK(ErrorOf(peer.Ask(R"({"jsonrpc":"2.0","id":{},"method":"status"})")) == -32600);
  CHECK(ErrorOf(peer.Ask(R"({"jsonrpc":"2.0","id":1,"method":"status","params":3})")) == -32600);
  CHECK(ErrorOf(peer.Ask(R"({"jsonrpc":"2.0","id":1,"method":"status","params":{"a":1}})")) == -32602);
  CHECK(ErrorOf(peer.Ask(R"({"jsonrpc":"2.0","id":1,"method":"shutdown"})")) == -32601);
  CHECK(ErrorOf(peer.Ask(std::string(60000, '['))) == -32700);
  CHECK(ErrorOf(peer.Ask(R"({"jsonrpc":"2.0","id":1,"method":"status","params":)" + std::string(17, '[') +
                         std::string(17, ']') + "}")) == -32700);
  const json named = peer.Ask(R"({"jsonrpc":"2.0","id":"my id","method":"nope"})");
  CHECK(named["id"] == "my id");
  // It is as well as before.
  CHECK(peer.Ask(R"({"jsonrpc":"2.0","id":null,"method":"status","params":[]})")["result"]["state"] == "ready");
  CHECK(scene.drains == 0);
}

TEST_CASE("ControlServer.NotificationsAreNotAnswered") {
  ControlScene scene;
  scene.Start();
  RawPeer peer(scene.options.path);
  REQUIRE(peer.Send(R"({"jsonrpc":"2.0","method":"drain"})"
                    "\n"
                    R"({"jsonrpc":"2.0","method":"status"})"
                    "\n"));
  CHECK(peer.Call("version")["result"]["version"] == "0.1.0");  // the first answer is this one's
  CHECK(scene.drains == 1);
}

TEST_CASE("ControlServer.PipelinedRequestsAreAnsweredInOrder") {
  ControlScene scene;
  scene.Start();
  RawPeer peer(scene.options.path);
  std::string text;
  for (int i = 0; i < 200; ++i)
    text += R"({"jsonrpc":"2.0","id":)" + std::to_string(i) + R"(,"method":"paths"})" + "\n";
  REQUIRE(peer.Send(text.substr(0, 1000)));
  REQUIRE(peer.Send(text.substr(1000)));
  for (int i = 0; i < 200; ++i) REQUIRE(json::parse(peer.Line())["id"] == i);
}

TEST_CASE("C31_ControlServer.ATooLongRequestIsRefusedAndTheConnectionEnds") {
  ControlScene scene;
  scene.Start();
  RawPeer peer(scene.options.path);
  peer.Send(std::string(64 * 1024 + 1, 'x'));
  CHECK(ErrorOf(json::parse(peer.Line())) == -32600);
  CHECK(peer.Line() == "");
  RawPeer longest(scene.options.path);  // 64 KiB are allowed
  std::string line = R"({"jsonrpc":"2.0","id":1,"method":"status"})";
  line += std::string(64 * 1024 - line.size(), ' ');
  CHECK(longest.Ask(line)["result"]["state"] == "ready");
}

TEST_CASE("C31_ControlServer.RandomBytesHurtNobody") {
  ControlScene scene;
  scene.Start();
  RawPeer witness(scene.options.path);
  std::mt19937 random(12345);
  const std::string valid = R"({"jsonrpc":"2.0","id":1,"method":"status","params":{}})";
  for (int round = 0; round < 300; ++round) {
    RawPeer peer(scene.options.path);
    REQUIRE(peer.error() == 0);
    std::string text = valid;
    for (int i = 0; i < 4; ++i) text[random() % text.size()] = static_cast<char>(random());
    text = text.substr(0, random() % (text.size() + 1)) + "\n";
    peer.Send(text);
    if (round % 2 == 0) CHECK_FALSE(json::parse(peer.Line(), nullptr, false).is_discarded());
  }
  CHECK(witness.Call("status")["result"]["state"] == "ready");
}

TEST_CASE("C31_ControlServer.APeerThatDoesNotReadIsCutOffAndCostsOneAnswer") {
  ControlScene scene;
  for (int i = 0; i < 5000; ++i) scene.snapshot.sessions.push_back(scene.snapshot.sessions[0]);  // answers of > 1 MB
  scene.options.idle_ns = 300'000'000;
  scene.Start();
  RawPeer peer(scene.options.path);
  std::string text;
  for (int i = 0; i < 500; ++i)
    text += R"({"jsonrpc":"2.0","id":1,"method":"status"})"
            "\n";
  peer.Send(text);
  // It is closed by its deadline: then what it still had in its queue is all it gets.
  pollfd hang_up{peer.fd(), POLLHUP | POLLRDHUP, 0};
  CHECK(::poll(&hang_up, 1, 20000) == 1);
  CHECK(scene.asked == 1);
}

TEST_CASE("ControlServer.IdleConnectionsAreClosedEvenIfBytesDripIn") {
  ControlScene scene;
  scene.options.idle_ns = 200'000'000;
  scene.Start();
  RawPeer silent(scene.options.path), dripping(scene.options.path);
  const auto start = std::chrono::steady_clock::now();
  while (dripping.Send("{") && std::chrono::steady_clock::now() - start < std::chrono::seconds(10))
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
  CHECK(silent.Line() == "");
}

TEST_CASE("ControlServer.ASnapshotThatDoesNotComeIsAnErrorNotAHang") {
  ControlScene scene;
  scene.hold_answers = true;
  scene.options.answer_ns = 100'000'000;
  scene.Start();
  RawPeer peer(scene.options.path);
  CHECK(ErrorOf(peer.Call("status")) == -32002);
  scene.Release();  // too late: dropped
  scene.OnServerThread([&] { scene.hold_answers = false; });
  CHECK(peer.Call("status")["result"]["state"] == "ready");
}

TEST_CASE("ControlServer.OneSnapshotIsInTheMakingAtATime") {
  ControlScene scene;
  scene.hold_answers = true;
  scene.Start();
  std::vector<std::unique_ptr<RawPeer>> peers;
  for (int i = 0; i < 20; ++i) {
    peers.push_back(std::make_unique<RawPeer>(scene.options.path));
    REQUIRE(peers.back()->Send(R"({"jsonrpc":"2.0","id":1,"method":"status"})"
                               "\n"));
  }
  // Until the server has read them all, and its thread has been through what it read.
  for (auto& peer : peers) {
    for (int unread = 1; unread != 0; std::this_thread::yield()) REQUIRE(::ioctl(peer->fd(), SIOCOUTQ, &unread) == 0);
  }
  for (int i = 0; i < 3; ++i) scene.OnServerThread([] {});
  CHECK(scene.asked == 1);
  scene.Release();  // the first peer's; the other nineteen share the next
  CHECK(scene.asked == 2);
  scene.Release();
  CHECK(scene.asked == 2);
  for (auto& peer : peers) CHECK(json::parse(peer->Line())["result"]["state"] == "ready");
}

TEST_CASE("ControlServer.ATraceIsReadInOrderOnce") {
  ControlScene scene;
  scene.trace.records.resize(10000);
  scene.Start();
  RawPeer peer(scene.options.path);
  const auto ask = [&](const std::string& method, const std::string& params) {
    return peer.Ask(R"({"jsonrpc":"2.0","id":1,"method":")" + method + R"(","params":)" + params + "}");
  };
  CHECK(ask("trace_start", R"({"seconds":1})")["result"]["trace"] == 1);
  uint64_t from = 0;
  size_t events = 0;
  for (int pieces = 1;; ++pieces) {
    const std::string params = R"({"trace":1,"from":)" + std::to_string(from) + "}";
    const json piece = ask("trace_read", params)["result"];
    for (const json& event : piece["events"]) events += event["name"] == "blocks" ? 1 : 0;
    if (piece["next"].is_null()) {
      CHECK(pieces == 3);
      break;
    }
    for (const std::string& wrong :
         {params, std::string(R"({"trace":1})"), std::string(R"({"trace":1,"from":1000000})")}) {
      const json refused = ask("trace_read", wrong);
      CHECK(ErrorOf(refused) == -32602);
      CHECK(refused["error"]["message"].get<std::string>().find("in order, once") != std::string::npos);
    }
    from = piece["next"];
  }
  CHECK(events == 10000);
  CHECK(ErrorOf(ask("trace_read", R"({"trace":1,"from":0})")) == -32602);  // read: gone
}

TEST_CASE("ControlServer.CheckpointsSayHowFarTheyAre") {
  ControlScene scene;
  mlpo::CheckpointSnapshot part;
  part.job = "mine";
  part.uid = 65534;
  part.rank = 1;
  part.directory = "/ckpt";
  part.tag = "step-9";
  part.step = 9;
  part.phase = "copying";
  part.bytes = 1000;
  part.copied_bytes = 250;
  part.bound_s = 7.5;
  scene.snapshot.checkpoints = {part, part};
  scene.snapshot.checkpoints[1].uid = 4000;
  scene.snapshot.checkpoint_totals = {5, 2, 1, 1250};
  scene.Start();
  RawPeer admin(scene.options.path);
  const json told = admin.Call("status")["result"]["checkpoints"];
  CHECK(told["begun"] == 5);
  CHECK(told["saved"] == 2);
  CHECK(told["failed"] == 1);
  CHECK(told["copied_bytes"] == 1250);
  REQUIRE(told["running"].size() == 2);
  const json& first = told["running"].at(0);
  CHECK(first["tag"] == "step-9");
  CHECK(first["phase"] == "copying");
  CHECK(first["copied_bytes"] == 250);
  CHECK(first["bound_s"] == 7.5);
  const std::string metrics = admin.Call("metrics")["result"]["text"];
  CHECK(metrics.find("mlpo_checkpoint_parts_total{result=\"failed\"} 1") != std::string::npos);
  CHECK(metrics.find("mlpo_checkpoint_parts_running 2") != std::string::npos);
  if (!Root()) return;
  REQUIRE(::chmod(scene.dir.path().c_str(), 0755) == 0);
  const ThreadUid other(4000, {});
  RawPeer peer(scene.options.path);
  CHECK(peer.Call("status")["result"]["checkpoints"]["running"].size() == 1);
}

TEST_CASE("ControlServer.CheckpointsAreAskedOfOnesOwnSessions") {
  ControlScene scene;
  scene.Start();
  const auto ask = [&](RawPeer& peer, const std::string& params) {
    return peer.Ask(R"({"jsonrpc":"2.0","id":1,"method":"checkpoint_request","params":)" + params + "}");
  };
  RawPeer admin(scene.options.path);
  CHECK(admin.Call("checkpoint_request")["result"]["sessions"] == 2);
  CHECK(ask(admin, R"({"job":"other"})")["result"]["sessions"] == 1);
  CHECK(ask(admin, R"({"job":"nobody's"})")["result"]["sessions"] == 0);
  for (const char* wrong : {R"({"job":7})", R"({"jobs":"mine"})", R"(["mine"])"}) {
    INFO(wrong);
    CHECK(ErrorOf(ask(admin, wrong)) == -32602);
  }
  if (!Root()) return;
  REQUIRE(::chmod(scene.dir.path().c_str(), 0755) == 0);
  const ThreadUid other(4000, {});
  RawPeer peer(scene.options.path);
  CHECK(peer.Call("checkpoint_request")["result"]["sessions"] == 1);
  CHECK(ask(peer, R"({"job":"mine"})")["result"]["sessions"] == 0);
}

TEST_CASE("ControlServer.NodesTellWhatTheySeeOfAPath") {
  ControlScene scene;
  scene.snapshot.paths[0].node_share = "measured";
  scene.snapshot.paths[0].node_part = 0.25;
  scene.snapshot.paths[0].nodes = 4;
  scene.snapshot.paths[0].seen_bytes_per_s = 9e8;
  scene.Start();
  RawPeer peer(scene.options.path);
  const auto ask = [&](const std::string& method, const std::string& params) {
    return peer.Ask(R"({"jsonrpc":"2.0","id":1,"method":")" + method + R"(","params":)" + params + "}");
  };
  CHECK(ask("share_figures", R"({"job":"mine"})")["result"]["daemon"] == "d");
  std::vector<std::string> commands;
  scene.OnServerThread([&] { commands = scene.commands; });
  CHECK(commands == std::vector<std::string>{"figures of mine for " + std::to_string(::geteuid())});
  for (const char* wrong : {"{}", R"({"job":7})", R"({"job":"mine","x":1})", R"(["mine"])"}) {
    INFO(wrong);
    CHECK(ErrorOf(ask("share_figures", wrong)) == -32602);
  }
  const json told = ask("share", R"({"job":"mine","path":"nvme","nodes":[[1e9,2,3.5,4],[5,0,0,8]],"me":1})");
  CHECK(told["result"]["nodes"] == 2);
  std::vector<mlpo::ShareRequest> shares;
  scene.OnServerThread([&] { shares = scene.shares; });
  REQUIRE(shares.size() == 1);
  CHECK(shares[0].uid == ::geteuid());
  CHECK(shares[0].job == "mine");
  CHECK(shares[0].me == 1);
  REQUIRE(shares[0].nodes.size() == 2);
  CHECK(shares[0].nodes[0].seen_bytes_per_s == 1e9);
  CHECK(shares[0].nodes[0].busy_s == 2);
  CHECK(shares[0].nodes[0].others_bytes_per_s == 3.5);
  CHECK(shares[0].nodes[1].step_bytes == 8);
  CHECK(ErrorOf(ask("share", R"({"job":"mine","path":"x","nodes":[[1,2,3,4]],"me":0})")) == -32004);
  for (const char* wrong :
       {R"({"job":"mine","path":"nvme","nodes":[[1,2,3,4]],"me":1})",
        R"({"job":"mine","path":"nvme","nodes":[],"me":0})", R"({"job":"mine","path":"nvme","nodes":[[1,2,3]],"me":0})",
        R"({"job":"mine","path":"nvme","nodes":[[1,2,3,-4]],"me":0})",
        R"({"job":"mine","path":"nvme","nodes":[[1,2,3,1e300]],"me":0})",
        R"({"job":"mine","path":"nvme","nodes":[[1,2,3,"4"]],"me":0})",
        R"({"job":"mine","path":"nvme","nodes":[[1,2,3,4]],"me":-1})",
        R"({"job":"mine","path":"nvme","nodes":[[1,2,3,4]]})",
        R"({"job":"mine","path":"nvme","nodes":[[1,2,3,4]],"me":0,"x":0})"}) {
    INFO(wrong);
    CHECK(ErrorOf(ask("share", wrong)) == -32602);
  }
  const json share = peer.Call("paths")["result"]["paths"].at(0)["node_share"];
  CHECK(share["share"] == "measured");
  CHECK(share["part"] == 0.25);
  CHECK(share["nodes"] == 4);
  CHECK(share["seen_bytes_per_s"] == 9e8);
  CHECK(share["granted_bytes_per_s"].is_null());
}

TEST_CASE("ControlServer.ConnectionsAreLimitedAndComeBack") {
  ControlScene scene;
  scene.Start();
  std::vector<std::unique_ptr<RawPeer>> peers;
  for (int i = 0; i < 64; ++i) {
    peers.push_back(std::make_unique<RawPeer>(scene.options.path));
    REQUIRE(peers.back()->Call("version").contains("result"));
  }
  RawPeer refused(scene.options.path);
  CHECK(ErrorOf(json::parse(refused.Line())) == -32003);
  CHECK(refused.Line() == "");
  peers.pop_back();
  for (int attempt = 0;; ++attempt) {  // the server sees the end a moment later
    RawPeer peer(scene.options.path);
    if (peer.Call("version").contains("result")) break;
    REQUIRE(attempt < 1000);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

TEST_CASE("ControlServer.CommandsForAPathAreChecked") {
  ControlScene scene;
  scene.Start();
  RawPeer peer(scene.options.path);
  const auto ask = [&](const std::string& method, const std::string& params) {
    return peer.Ask(R"({"jsonrpc":"2.0","id":1,"method":")" + method + R"(","params":)" + params + "}");
  };
  for (const char* params :
       {"{}", "[]", R"(["nvme"])", R"({"path":1})", R"({"path":"nvme","x":1})", R"({"x":"nvme"})"}) {
    CAPTURE(params);
    CHECK(ErrorOf(ask("paths_disable", params)) == -32602);
  }
  CHECK(ErrorOf(ask("paths_remove", R"({"path":"nvme"})")) == -32601);
  CHECK(ErrorOf(ask("paths_", R"({"path":"nvme"})")) == -32601);
  const json unknown = ask("paths_disable", R"({"path":"\u0000/x"})");
  CHECK(ErrorOf(unknown) == -32004);
  CHECK(ask("paths_disable", R"({"path":"nvme"})")["result"]["state"] == "disabled");
  CHECK(peer.Call("paths")["result"]["paths"][0]["evacuation"].is_null());
  CHECK(ask("paths_evacuate", R"({"path":"nvme"})")["result"]["total_bytes"] == 99);
  const json evacuation = peer.Call("paths")["result"]["paths"][0]["evacuation"];
  CHECK(evacuation == json::parse(R"({"total_bytes":99,"left_bytes":0,"unreadable_blocks":0,"done":true})"));
}

TEST_CASE("ControlServer.GcIsForAdministratorsAndItsParametersAreChecked") {
  ControlScene scene;
  scene.options.admin_group = 4242;
  scene.Start();
  RawPeer peer(scene.options.path);
  const auto ask = [&](const std::string& params) {
    return peer.Ask(R"({"jsonrpc":"2.0","id":1,"method":"gc","params":)" + params + "}");
  };
  for (const char* params : {R"([1])", R"({"dry_run":1})", R"({"node":null})", R"({"x":true})"}) {
    CAPTURE(params);
    CHECK(ErrorOf(ask(params)) == -32602);
  }
  CHECK(peer.Call("gc")["result"]["removed"].empty());
  CHECK(ask(R"({"dry_run":true,"node":"n7"})").contains("result"));
  scene.OnServerThread([&] { CHECK(scene.commands == std::vector<std::string>{"gc ", "dry gc n7"}); });
  if (!Root()) return;
  REQUIRE(::chmod(scene.dir.path().c_str(), 0755) == 0);
  std::unique_ptr<RawPeer> stranger;
  {
    ThreadUid as(65534, {65534});
    stranger = std::make_unique<RawPeer>(scene.options.path);
  }
  CHECK(ErrorOf(stranger->Call("gc")) == -32001);
}

TEST_CASE("ControlServer.PathsSayWhatIsWrongWithThem") {
  ControlScene scene;
  scene.snapshot.taken_ns = 5'000'000'000;
  scene.snapshot.paths[0].error = ENOSPC;
  scene.snapshot.paths[0].state_since_ns = 3'500'000'000;
  scene.snapshot.paths[0].probes = 7;
  scene.snapshot.paths[0].failed_probes = 6;
  scene.snapshot.paths[0].scratch_bytes = 4096;
  scene.snapshot.paths[0].evacuating = true;
  scene.Start();
  RawPeer peer(scene.options.path);
  const json path = peer.Call("paths")["result"]["paths"][0];
  CHECK(path["error"] == "No space left on device");
  CHECK(path["state_s"] == 1.5);
  CHECK(path["probes"] == 7);
  CHECK(path["failed_probes"] == 6);
  const std::string metrics = peer.Call("metrics")["result"]["text"];
  CHECK(metrics.find("mlpo_path_probes_total{path=\"nvme\"} 7\n") != std::string::npos);
  CHECK(metrics.find("mlpo_path_probe_failures_total{path=\"nvme\"} 6\n") != std::string::npos);
  CHECK(metrics.find("mlpo_path_evacuation_left_bytes{path=\"nvme\"} 4194\n") != std::string::npos);
}

TEST_CASE("C30_ControlServer.OthersSeeTheirOwnSessionsAndCommandNothing") {
  if (!Root()) return;
  ControlScene scene;
  REQUIRE(::chmod(scene.dir.path().c_str(), 0755) == 0);
  scene.options.admin_group = 4242;
  scene.Start();
  std::unique_ptr<RawPeer> stranger, admin;
  {
    ThreadUid as(65534, {65534});
    stranger = std::make_unique<RawPeer>(scene.options.path);
  }
  {
    ThreadUid as(65534, {4242});
    admin = std::make_unique<RawPeer>(scene.options.path);
  }
  REQUIRE(stranger->error() == 0);
  REQUIRE(admin->error() == 0);
  const json status = stranger->Call("status")["result"];
  REQUIRE(status["sessions"].size() == 1);
  CHECK(status["sessions"][0]["job"] == "mine");
  CHECK(status["totals"]["sessions"] == 2);
  CHECK(status.dump().find("other") == std::string::npos);
  CHECK(stranger->Call("sessions")["result"]["sessions"].size() == 1);
  CHECK(ErrorOf(stranger->Call("drain")) == -32001);
  CHECK(scene.drains == 0);
  CHECK(ErrorOf(stranger->Call("doctor")) == -32001);
  CHECK(scene.examinations == 0);
  for (const std::string command : {"disable", "enable", "evacuate"}) {
    const std::string line = R"({"jsonrpc":"2.0","id":1,"method":"paths_)" + command + R"(","params":{"path":"nvme"}})";
    CHECK(ErrorOf(stranger->Ask(line)) == -32001);
    CHECK(admin->Ask(line).contains("result"));
  }
  scene.OnServerThread([&] {
    CHECK(scene.commands == std::vector<std::string>{"disable nvme", "enable nvme", "evacuate nvme"});
  });
  CHECK(admin->Call("doctor")["result"]["state"] == "fine");
  const std::string metrics = stranger->Call("metrics")["result"]["text"];
  CHECK(metrics.find("mlpo_session_parameters{job=\"mine\",rank=\"1\",uid=\"65534\"} 268000000\n") !=
        std::string::npos);
  CHECK(metrics.find("mlpo_parameters 268001000\n") != std::string::npos);
  CHECK(metrics.find("job=\"other\"") == std::string::npos);
  const std::string all = admin->Call("metrics")["result"]["text"];
  CHECK(all.find("job=\"other\"") != std::string::npos);
  CHECK(admin->Call("status")["result"]["sessions"].size() == 2);
  CHECK(admin->Call("drain").contains("result"));
  CHECK(scene.drains == 1);
}

TEST_CASE("C30_ControlServer.OneUidCannotTakeAllConnections") {
  if (!Root()) return;
  ControlScene scene;
  REQUIRE(::chmod(scene.dir.path().c_str(), 0755) == 0);
  scene.Start();
  std::vector<std::unique_ptr<RawPeer>> peers;
  int refused = 0;
  {
    ThreadUid as(65534, {});
    for (int i = 0; i < 20; ++i) peers.push_back(std::make_unique<RawPeer>(scene.options.path));
  }
  for (auto& peer : peers) refused += peer->Call("version").contains("result") ? 0 : 1;
  CHECK(refused == 12);
  RawPeer root(scene.options.path);
  CHECK(root.Call("version").contains("result"));
}

TEST_CASE("ControlServer.StoppingClosesConnectionsAndRemovesTheSocket") {
  ControlScene scene;
  scene.hold_answers = true;
  scene.Start();
  RawPeer idle(scene.options.path), waiting(scene.options.path);
  REQUIRE(waiting.Send(R"({"jsonrpc":"2.0","id":1,"method":"status"})"
                       "\n"));
  while (scene.asked == 0) std::this_thread::yield();
  scene.Stop();
  CHECK(idle.Line() == "");
  CHECK(waiting.Line() == "");
  struct stat st;
  CHECK(::lstat(scene.options.path.c_str(), &st) != 0);
  scene.Release();  // an answer after the end is dropped
}
