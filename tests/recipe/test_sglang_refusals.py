"""Servers that differ from what a recipe needs in one thing each are refused, and the thing is named."""

from pathlib import Path

import pytest
from sglang_case import AUX_LAYERS, cpu_environment, hook_of, options
from sglang_cpu.targets import make_target

from eagle3.errors import UserError
from eagle3.targets.sglang.server import SGLangServer
from eagle3.targets.sglang.version import capture_flags, require_capture

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "llama"
    make_target("llama", folder)
    return folder


@pytest.mark.parametrize(
    ("flags", "hook", "named"),
    [
        (["--dtype", "bfloat16"], {}, "dtype of the target 'bfloat16' (here: 'float32')"),
        (["--revision", "abc"], {}, "revision 'abc' (here: None)"),
        (["--kv-cache-dtype", "bfloat16"], {}, "kv_cache_dtype 'bfloat16' (here: 'auto')"),
        (["--load-format", "dummy"], {}, "load_format 'dummy' (here: 'auto')"),
        (["--json-model-override-args", '{"rope_theta": 5.0}'], {}, "json_model_override_args"),
        (["--weight-version", "2"], {}, "weight_version (its weights were replaced) '2' (here: 'default')"),
        (["--return-aux-hidden-state-layer-ids", "0", "2", "4"], {}, "aux layers [0, 2, 4] (here: [1, 2, 4])"),
        (["--context-length", "64"], {}, "--context-length 64, too short for a sample of 200 tokens"),
        (["--enable-mixed-chunk"], {}, "enable_mixed_chunk True (here: False)"),
        ([], {"spool": "/dev/shm/another"}, "spool '/dev/shm/another' (here: "),
        ([], {"dtype": "bfloat16"}, "dtype 'bfloat16' (here: 'float32')"),
        ([], {"target": "0123"}, "target '0123' (here: "),
    ],
)
def test_a_server_that_differs_in_one_thing_is_refused_and_the_thing_is_named(model, tmp_path, flags, hook, named):
    settings = hook_of(tmp_path / "spool", model)
    started = capture_flags(AUX_LAYERS, settings._replace(**hook)._asdict())
    with (
        cpu_environment(),
        SGLangServer(options(model), [*started, *flags]) as server,  # of two flags, the last counts
        pytest.raises(UserError) as refusal,
    ):
        require_capture(server.url, settings._asdict(), AUX_LAYERS, dtype="float32", longest=200)
    assert named in str(refusal.value) and "--print-server" in str(refusal.value)
    assert str(refusal.value).count("(here: ") <= 1, "nothing else differs"
