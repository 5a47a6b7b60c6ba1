"""The sources keep the include rules of structure.py, and structure.py sees each rule broken."""

from __future__ import annotations

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.dont_write_bytecode = True

from structure import STAGES, violations  # noqa: E402

REPO = pathlib.Path(__file__).resolve().parents[2]


class Structure(unittest.TestCase):
    def broken(self, files: dict[str, str]) -> list[str]:
        """The violations in a tree of these files."""
        with tempfile.TemporaryDirectory() as name:
            root = pathlib.Path(name)
            for path, text in files.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text)
            return violations(root)

    def assert_breaks(self, file: str, include: str, rule: str) -> None:
        found = self.broken({file: f"// A comment.\n#include {include}\n"})
        self.assertEqual(len(found), 1, f"{file} with {include}: {found}")
        self.assertIn(f"{file}:2: ", found[0])
        self.assertIn(rule, found[0])

    def assert_keeps(self, file: str, *includes: str) -> None:
        self.assertEqual(self.broken({file: "".join(f"#include {include}\n" for include in includes)}), [])

    def test_this_tree_keeps_the_rules(self) -> None:
        self.assertEqual(violations(REPO), [])

    def test_this_tree_is_seen(self) -> None:
        # Were nothing found to check, everything would pass.
        for part in ("proto/abi.h", "client/include/mlpo/client.h", "daemon/main.cc", "daemon/io/uring_queue.h"):
            self.assertTrue((REPO / part).exists(), part)

    def test_proto_includes_libc_only(self) -> None:
        self.assert_keeps("proto/a.h", "<stdint.h>", '"proto/b.h"')
        self.assert_breaks("proto/a.h", "<vector>", "only libc")
        self.assert_breaks("proto/a.h", "<unistd.h>", "only libc")
        self.assert_breaks("proto/a.h", '"daemon/base/status.h"', "only proto and libc")
        self.assert_keeps("proto/spsc_ring.hpp", "<atomic>", '"proto/b.h"')
        self.assert_breaks("proto/spsc_ring.hpp", "<boost/asio.hpp>", "standard library")

    def test_client_includes_proto_and_itself(self) -> None:
        self.assert_keeps("client/src/a.cc", '"client/src/a.h"', '"proto/ring.h"', '"mlpo/client.h"', "<poll.h>")
        self.assert_breaks("client/src/a.cc", '"daemon/base/status.h"', "only proto and itself")
        self.assert_breaks("client/ctl/a.cc", '"daemon/config/load.h"', "only proto and itself")
        self.assert_breaks("client/src/a.cc", '"tests/support/catch.h"', "only proto and itself")

    def test_stages_never_include_each_other(self) -> None:
        for stage in STAGES:
            file = f"daemon/{stage}/a.cc"
            self.assert_keeps(file, f'"daemon/{stage}/a.h"', '"daemon/base/b.h"', '"daemon/config/config.h"')
            self.assert_keeps(file, '"daemon/types/ids.h"', '"proto/abi.h"')
            for other in STAGES:
                if other not in (stage, "config"):
                    self.assert_breaks(file, f'"daemon/{other}/b.h"', f"does not include daemon/{other}")
            self.assert_breaks(file, '"daemon/data_loop.h"', "does not include daemon")

    def test_base_and_types_are_below_the_stages(self) -> None:
        self.assert_keeps("daemon/base/a.h", '"daemon/base/b.h"', '"proto/status.h"')
        self.assert_breaks("daemon/base/a.h", '"daemon/types/ids.h"', "does not include")
        self.assert_breaks("daemon/base/a.h", '"daemon/config/config.h"', "does not include")
        self.assert_breaks("daemon/types/a.h", '"daemon/config/config.h"', "does not include")
        self.assert_breaks("daemon/types/a.h", '"daemon/io/path.h"', "does not include")

    def test_the_wiring_includes_all_stages(self) -> None:
        self.assert_keeps("daemon/daemon.cc", *(f'"daemon/{stage}/a.h"' for stage in STAGES), '"proto/ring.h"')

    def test_the_daemon_does_not_include_the_client(self) -> None:
        self.assert_breaks("daemon/daemon.cc", '"mlpo/client.h"', "does not include client")
        self.assert_breaks("daemon/daemon.cc", "<mlpo/client.h>", "does not include client")
        self.assert_breaks("daemon/session/a.cc", '"client/src/session.h"', "does not include client")
        self.assert_keeps("daemon/bench/a.cc", '"mlpo/client.h"', '"daemon/adam/kernel.h"', '"daemon/io/io.h"')

    def test_only_session_and_completion_see_the_ring(self) -> None:
        for header in ('"proto/ring.h"', '"proto/spsc_ring.hpp"'):
            self.assert_keeps("daemon/session/a.h", header)
            self.assert_keeps("daemon/completion/a.h", header)
            for folder in ("base", "types", "config", "io", "adam", "scheduler", "checkpoint", "control"):
                self.assert_breaks(f"daemon/{folder}/a.h", header, "see the ring")

    def test_only_uring_files_of_io_include_liburing(self) -> None:
        self.assert_keeps("daemon/io/uring_queue.cc", "<liburing.h>")
        self.assert_breaks("daemon/io/path.cc", "<liburing.h>", "liburing")
        self.assert_breaks("daemon/adam/uring_a.cc", "<liburing.h>", "liburing")
        self.assert_breaks("daemon/main.cc", "<liburing.h>", "liburing")

    def test_policy_makes_no_system_calls_and_knows_no_threads(self) -> None:
        self.assert_keeps("daemon/scheduler/a.cc", "<vector>", "<boost/intrusive/set.hpp>", "<errno.h>")
        self.assert_breaks("daemon/scheduler/a.cc", "<unistd.h>", "no system calls")
        self.assert_breaks("daemon/scheduler/a.cc", "<sys/mman.h>", "no system calls")
        self.assert_breaks("daemon/scheduler/a.cc", "<boost/asio.hpp>", "no system calls")
        self.assert_breaks("daemon/scheduler/a.cc", "<mutex>", "no threads")
        self.assert_breaks("daemon/types/a.h", "<thread>", "no threads")

    def test_the_daemon_is_free_of_cuda(self) -> None:
        self.assert_breaks("daemon/io/a.cc", "<cuda_runtime.h>", "CUDA")

    def test_headers_are_named_by_their_place(self) -> None:
        self.assert_breaks("daemon/io/a.cc", '"path.h"', "by its place")
        self.assert_breaks("daemon/io/a.cc", '"../adam/kernel.h"', "by its place")
        self.assert_breaks("daemon/io/a.cc", '"daemon/io/../adam/kernel.h"', "by its place")
        self.assert_breaks("daemon/io/a.cc", "<daemon/io/path.h>", "in quotes")

    def test_every_spelling_of_an_include_is_read(self) -> None:
        for text in ('#include"daemon/adam/k.h"', '  #  include  "daemon/adam/k.h"', '#include "daemon/adam/k.h"  // x'):
            self.assertEqual(len(self.broken({"daemon/io/a.cc": text + "\n"})), 1, text)
        for text in ('// #include "daemon/adam/k.h"', '/*\n#include "daemon/adam/k.h"\n*/'):
            self.assertEqual(self.broken({"daemon/io/a.cc": text + "\n"}), [], text)
        found = self.broken({"daemon/io/a.hpp": '/* one\ntwo */\n\n#include "daemon/adam/k.h"\n'})
        self.assertIn("daemon/io/a.hpp:4: ", found[0])

    def test_a_new_folder_needs_a_rule(self) -> None:
        self.assertIn("unknown folder", self.broken({"daemon/common/a.h": "\n"})[0])

    def test_targets_link_as_sources_include(self) -> None:
        self.assertEqual(
            self.broken({"daemon/io/CMakeLists.txt": "mlpo_library(io a.cc)\ntarget_link_libraries(mlpo_io mlpo_base)\n"}),
            [],
        )
        found = self.broken({"daemon/io/CMakeLists.txt": "target_link_libraries(mlpo_io PUBLIC mlpo_adam)\n"})
        self.assertEqual(len(found), 1)
        self.assertIn("does not link adam", found[0])


if __name__ == "__main__":
    unittest.main()
