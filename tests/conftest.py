"""What every test file shares: repeatable draws, one thread, no network, the golden models."""

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="d2f-rows-")  # of commands, too
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # of the commands that tests start: xdist runs one a core

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined

from hypothesis import settings
from tiny import changed_models

from d2f.loading import load

atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, database=None, max_examples=40
)
settings.load_profile("repeatable")
torch.set_num_threads(1)  # xdist runs one worker a core
# A shell script that starts the tests in the background has Ctrl-C ignored by all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of what the official implementations gave (README.md there)."""
    return GOLDEN


@pytest.fixture(scope="session")
def llada():
    """golden/llada-tiny in fp32, without adapter. Shared: not to be changed."""
    return load(GOLDEN / "llada-tiny", device="cpu")


@pytest.fixture(scope="session")
def dream():
    """golden/dream-tiny in fp32, without adapter. Shared: not to be changed."""
    return load(GOLDEN / "dream-tiny", device="cpu")


@pytest.fixture(scope="session")
def word_tokenizer():
    """A tokenizer of a few words, with a mask and an end token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<mask>", "<unk>", *(f"w{i}" for i in range(28))]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        mask_token="<mask>",
        unk_token="<unk>",
    )


@pytest.fixture(autouse=True, scope="module")
def _shared_models_stay_as_they_are():
    yield
    changed = changed_models()
    assert not changed, f"a test here changed {', '.join(changed)}, which others decode with"


@pytest.fixture(autouse=True)
def _the_process_stays_as_it_is():
    before = _process_state()
    yield
    assert _process_state() == before


def _process_state() -> dict[str, object]:
    """What decides how all tests of this process compute."""
    return {
        "default dtype": torch.get_default_dtype(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "mkldnn": torch.backends.mkldnn.enabled,
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        # Not all of Triton's: on a GPU torch.compile sets where it keeps what it compiled.
        "variables": {
            k: v for k, v in os.environ.items() if k.startswith("D2F_") or k == "TRITON_INTERPRET"
        },
    }
