"""Packaging of d2f-toolkit. Settings of the tools (ruff, mypy, pytest) are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
INIT = (ROOT / "d2f" / "__init__.py").read_text(encoding="utf-8")
VERSION = re.findall(r'^__version__ = "(.+)"$', INIT, re.MULTILINE)[0]  # without importing d2f

setup(
    name="d2f-toolkit",
    version=VERSION,
    description="Decode, distil and measure diffusion language models that run faster than one "
    "token a step: D2F and its relatives, on transformers' own model classes",
    long_description=README,
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["diffusion language models", "D2F", "LLaDA", "Dream", "distillation", "decoding"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11,<3.13",
    packages=[
        *find_packages(
            include=[
                f"{package}{suffix}"
                for package in ("d2f", "distill", "decode", "triton_kernels")
                for suffix in ("", ".*")
            ]
        ),
        "d2f.configs",
    ],
    package_dir={"d2f.configs": "configs"},  # found there in a checkout: d2f/shipped.py
    entry_points={"console_scripts": ["d2f = d2f.command:main"]},
    package_data={
        "": ["py.typed"],
        "d2f.configs": ["*/*.yaml"],
        "decode.server": ["page/*"],
        "decode.harness.tasks": ["*.yaml"],
        "d2f": [
            "cpu/*.cpp",
            "models/**/*.json",
            "models/**/*.safetensors",
            "models/**/*.md",
            "models/**/*.py",  # what makes AutoTokenizer read tokenizer.json as it is
            "models/**/*.jinja",
        ],
    },
    install_requires=[
        "torch>=2.11,<2.14",
        "transformers>=5.17,<5.24",
        "peft>=0.21",
        "accelerate>=1.15",
        "datasets>=4.0",
        "tokenizers>=0.23.1",
        "safetensors>=0.8",
        "huggingface_hub>=1.5",
        "numpy>=2.0",
        "einops>=0.8",
        "asteval>=1.0",  # interprets the functions of the task coding
        "jinja2>=3.1",  # chat templates
        "regex",  # patterns of task files, with a time limit
        "pydantic>=2.10",
        "pyyaml>=6.0",
        "rich>=13.7",
        "tyro>=1.0.17,<1.1",  # its hook for parse errors is private
        "psutil>=6.0",
        "filelock>=3.24",
        "tqdm>=4.67",
    ],
    extras_require={
        "serve": [
            "fastapi>=0.120",
            "uvicorn>=0.38",
            "prometheus-client>=0.23",
            "sse-starlette>=3.3",
        ],
        "ray": ["ray[serve,data]>=2.60,<2.61"],
        "evaluation": [
            "lm-eval>=0.4.11",
            "math-verify>=0.9",
            "markdown-it-py>=3.0",
        ],
        "plot": ["matplotlib>=3.9"],
        "compare": ["openai>=2.0", "httpx>=0.28", "matplotlib>=3.9"],
        "tune": ["optuna>=4.0", "matplotlib>=3.9"],
        "track": ["wandb>=0.25", "tensorboard>=2.20"],
        "quantize": ["torchao>=0.18,<0.19", "bitsandbytes>=0.48"],
        "gguf": ["gguf>=0.17"],
        "deepspeed": ["deepspeed>=0.18"],
        "docs": [
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.6",
            "mkdocstrings[python]>=1.0",
            "ruff>=0.17,<0.18",  # breaks long signatures
        ],
        # ruff and mypy find more with each release, so `make lint` holds to one of each.
        "dev": [
            "bitsandbytes>=0.48",
            "fastapi>=0.120",
            "uvicorn>=0.38",
            "gguf>=0.17",
            "openai>=2.0",
            "lm-eval[api]>=0.4.11",
            "prometheus-client>=0.23",
            "sse-starlette>=3.3",
            "ray[serve,data]>=2.60,<2.61",
            "torchao>=0.18,<0.19",
            # Interprets the kernels in tests; 3.6 needs numpy below 2.4. CUDA's torch brings it.
            "triton>=3.6,<3.10; sys_platform == 'linux'",
            "playwright>=1.55",  # drives a chromium that is there already
            "pillow>=11.0",  # benchmarks/record_page.py
            "pytest>=9.0,<9.2",  # with 9.2 pytest-xdist 3.8 ignores groups (its issue 1386)
            "pytest-xdist>=3.8",
            "hypothesis>=6.150",
            "mutmut>=3.8,<3.9",  # `make mutate` takes its faults, which are not its interface
            "coverage>=7.17",  # brings the .pth that measures processes which tests start
            "ruff>=0.17,<0.18",
            "setuptools>=77",  # a test builds the wheel
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.6",
            "mkdocstrings[python]>=1.0",
            "mypy>=2.4,<2.5",
            "types-PyYAML>=6.0",
            "tensorboard>=2.20",
            "wandb>=0.25",
            "httpx>=0.28",
            "matplotlib>=3.9",
            "optuna>=4.0",
            "scipy>=1.13",
            "math-verify>=0.9",
        ],
    },
)
