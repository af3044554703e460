"""Packaging of ds_tsp. Tools are set up in pyproject.toml; exact tested versions are in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).with_name("README.md")

setup(
    name="ds_tsp",
    version="0.1.0",
    description="Tensor and sequence parallelism folded onto one axis, for DeepSpeed and Hugging Face models",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["ds_tsp", "ds_tsp.*"]),
    entry_points={"console_scripts": ["ds_tsp = ds_tsp.cli:main"]},
    python_requires=">=3.11",  # what transformers 5.24 asks for
    # Tested with one version of each: torch 2.13.0, deepspeed 0.19.8, transformers 5.24.0. The ranges end where the
    # next release may change what ds_tsp leans on: torch's flash-attention operators on the CPU, DeepSpeed's engine
    # and ZeRO hooks, transformers' attention interface and tensor-parallel plans.
    install_requires=[
        "deepspeed>=0.19.8,<0.20",
        "pydantic>=2.10,<3",
        "safetensors>=0.8,<1",
        "torch>=2.13,<2.14",
        "tqdm",
        "transformers>=5.24,<5.25",
    ],
    extras_require={
        "mpi": ["mpi4py>=4"],
        "flash": ["flash-attn>=2.7"],
        "monitor": ["tensorboard>=2.20"],
        "bench": ["matplotlib>=3.10,<4"],
        "dev": [
            "hypothesis>=6.100",
            "matplotlib>=3.10,<4",
            "mypy>=2.4,<3",
            "ninja",
            "pytest>=9,<10",
            "ruff>=0.17.6,<0.18",
        ],
    },
)
