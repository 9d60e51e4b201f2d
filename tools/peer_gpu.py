# SPDX-License-Identifier: Apache-2.0
"""Bring LMCache, the peer, to a bare GPU machine, with its native extension built for the torch that is there.

    python -m tools.peer_gpu fetch                          # here: fills .peer/ (35 MB; once 4 GB of build environment)
    python3 tools/peer_gpu.py build --into /tmp/peer        # there, without a network; prints what is loaded

The wheel's own extension is tied to another torch; where that is not there, the peer says so in one line and works five
times slower. So ``fetch`` takes the wheel with what it needs and compiles the extension, and the types that it shares
with the rest, from the source distribution of the same version and against the GPU machine's torch; ``build`` puts them
in place. If the torch there is another one, ``build`` compiles there. It fails unless the extension can be loaded.
The machine is taken to have torch, cupy, numba and grpc, as its image does. ``.peer`` is not part of the repository.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["CheckFailed", "main"]

ROOT: Final = Path(__file__).resolve().parent.parent
CONSTRAINTS: Final = ROOT / "tools" / "peer-constraints.txt"
VERSION: Final = "0.5.6"
PYTHON: Final = "3.12"
TORCH: Final = "2.11.0"
COMPILER: Final = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "ninja==1.13.0",
    "setuptools==80.10.2",
    "setuptools-scm==10.3.4",
    "wheel==0.48.0",
    "numpy==2.2.6",
)
ARCHITECTURE: Final = "9.0"
NEEDED: Final = (
    "blake3",
    "cachetools",
    "cffi",
    "cryptography",
    "googleapis-common-protos",
    "importlib-metadata",
    "msgspec",
    "nvtx",
    "opentelemetry-api",
    "opentelemetry-exporter-otlp",
    "opentelemetry-exporter-otlp-proto-common",
    "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry-exporter-prometheus",
    "opentelemetry-proto",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "prometheus-client",
    "protobuf",
    "pyzmq",
)
"""What its server and its adapters import beyond what the machine has."""

CUDA_SOURCES: Final = (
    "pybind.cpp",
    "mem_kernels.cu",
    "mp_mem_kernels.cu",
    "phase_timing_recorder.cu",
    "blend_kernels.cu",
    "cal_cdf.cu",
    "ac_enc.cu",
    "ac_dec.cu",
    "pos_kernels.cu",
    "mem_alloc.cpp",
    "utils.cpp",
    "event_recorder.cpp",
    "completion_recorder.cpp",
)
NATIVE_SOURCES: Final = (
    "bitmap.cpp",
    "fold.cpp",
    "periodic_event_notifier.cpp",
    "pybind.cpp",
    "ttl_lock.cpp",
    "utils.cpp",
)
CHECK_S: Final = 120.0

SETUP: Final = """
import json, sys
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension
kind, sources, csrc = json.loads(sys.argv.pop())
made = CUDAExtension if kind == "cuda_ops" else CppExtension
flags = ["-O3", "-g0"]
flags = {"cxx": flags, "nvcc": ["-O3"]} if kind == "cuda_ops" else {"cxx": flags}
extension = made("lmcache." + kind, sources=sources, include_dirs=csrc, extra_compile_args=flags)
setup(name="peer-native", ext_modules=[extension], cmdclass={"build_ext": BuildExtension})
"""

CHECK: Final = """
import json, sys
import torch
import lmcache.cuda_ops as ops, lmcache.lmcache_native as native
said = {"torch": torch.__version__, "cuda_ops": ops.__file__, "lmcache_native": native.__file__}
if torch.cuda.is_available():
    from lmcache import device_ops
    said["direct_copies"] = bool(ops.batch_memcpy_supported())
    said["bound"] = hasattr(device_ops, "execute_direct_copy_transfer")
print(json.dumps(said))
"""


class CheckFailed(Exception):
    """The peer's native extension is not loaded."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    does = parser.add_subparsers(dest="does", required=True)
    fetching = does.add_parser("fetch", help="here, with a network")
    building = does.add_parser("build", help="on the GPU machine")
    fetching.add_argument(
        "--python", default=PYTHON, help="a Python of the GPU machine's version (default: %(default)s)"
    )
    building.add_argument("--into", type=Path, required=True, help="folder for the peer's packages")
    checking = does.add_parser("check", help="say what is loaded")
    checking.add_argument("--site", type=Path, required=True, help="where build put the peer")
    for one in (fetching, building):
        one.add_argument("--carried", type=Path, default=ROOT / ".peer", help="what travels (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        if options.does == "fetch":
            fetch(options.carried, options.python)
        elif options.does == "build":
            print(json.dumps(build(options.carried, options.into)))
        else:
            print(json.dumps(checked(options.site)))
    except CheckFailed as e:
        print(f"peer_gpu: {e}", file=sys.stderr)
        return 1
    return 0


def fetch(carried: Path, interpreter: str) -> None:
    """Fill *carried* with wheels, sources and the compiled extension.

    Raises:
        CheckFailed: something could not be had, or does not load.
    """
    shutil.rmtree(carried, ignore_errors=True)
    carried.mkdir(parents=True)
    python = environment(interpreter)
    wheels(carried / "wheels")
    sources(python, carried / "csrc")
    native(str(python), carried / "csrc", carried / "built", seconds=1800)
    made = {"torch": f"{TORCH}+cu130", "python": PYTHON, "lmcache": VERSION, "architecture": ARCHITECTURE}
    (carried / "made.json").write_text(json.dumps(made) + "\n")
    size = sum(file.stat().st_size for file in carried.rglob("*") if file.is_file())
    say(f"{carried}: {size / 2**20:.1f} MiB")


def environment(interpreter: str) -> Path:
    """Return the python of the environment in which the extension is compiled, installing it first if missing."""
    from tools.vllm_env import cache_folder, locked, run  # noqa: PLC0415 - not on the GPU machine

    decides = "\0".join((PYTHON, TORCH, *COMPILER))
    target = cache_folder() / f"peer-gpu-{VERSION}-{hashlib.sha256(decides.encode()).hexdigest()[:12]}"
    python = target / "bin" / "python"
    with locked(target.with_name(f"{target.name}.lock")):
        if not python.exists():
            partial = target.with_name(f"{target.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            say(f"installing torch {TORCH} and a CUDA compiler into {target} (once; 4 GB)")
            run("venv", "--quiet", "--relocatable", "--python", interpreter, str(partial))
            run("pip", "install", "--quiet", "--python", str(partial / "bin" / "python"), f"torch=={TORCH}", *COMPILER)
            partial.rename(target)
    return python


def wheels(into: Path) -> None:
    """Download the peer's wheel and what it needs."""
    from tools.gpu_wheels import PLATFORMS  # noqa: PLC0415 - not on the GPU machine

    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={PYTHON}", "--implementation=cp", f"--constraint={CONSTRAINTS}", f"--dest={into}"]
    command += [f"--platform={name}_x86_64" for name in ("manylinux_2_34", *PLATFORMS)]
    if subprocess.run([*command, f"lmcache=={VERSION}", *NEEDED], check=False).returncode:
        raise CheckFailed("the peer's wheels could not be downloaded; see above")


def sources(python: Path, into: Path) -> None:
    """Take the native sources out of the peer's source distribution."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "--python", str(python), "download", "--quiet", "--no-deps"]
        command += ["--no-binary=:all:", "--no-build-isolation", f"--dest={folder}", f"lmcache=={VERSION}"]
        if subprocess.run(command, check=False, env=os.environ | {"NO_NATIVE_EXT": "1"}).returncode:
            raise CheckFailed("the peer's source distribution could not be downloaded; see above")
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        (found,) = Path(folder).glob("*/csrc")
        shutil.copytree(found, into, ignore=shutil.ignore_patterns("sycl", "storage_backends"))


def native(python: str, csrc: Path, into: Path, seconds: float) -> None:
    """Compile both extensions with *python*'s torch and put them into *into*.

    Raises:
        CheckFailed: the compiler failed.
    """
    csrc, into = csrc.resolve(), into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    jobs = str(len(os.sched_getaffinity(0)))
    environ = os.environ | {"TORCH_CUDA_ARCH_LIST": ARCHITECTURE, "MAX_JOBS": jobs}
    plans = {
        "cuda_ops": ([f"cuda/{name}" for name in CUDA_SOURCES], [str(csrc)]),
        "lmcache_native": ([f"lmcache_native/{n}" for n in NATIVE_SOURCES], [str(csrc / "lmcache_native"), str(csrc)]),
    }
    with tempfile.TemporaryDirectory() as folder:
        setup = Path(folder) / "setup.py"
        setup.write_text(SETUP)
        environ |= bundled_compiler(python, Path(folder))
        running = {}
        for kind, (files, includes) in plans.items():
            plan = json.dumps([kind, [str(csrc / name) for name in files], includes])
            made = [f"--build-lib={folder}/lib", f"--build-temp={folder}/{kind}"]
            command = [python, str(setup), "build_ext", *made, plan]
            with (Path(folder) / f"{kind}.log").open("wb") as log:
                running[kind] = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log)
        try:
            for kind, process in running.items():
                finish(kind, process, Path(folder) / f"{kind}.log", seconds)
        finally:
            for process in running.values():
                process.kill()
                process.wait()
        for library in Path(folder).glob("lib/lmcache/*.so"):
            subprocess.run(["strip", "--strip-debug", str(library)], check=False)
            shutil.copy2(library, into / library.name)


def bundled_compiler(python: str, folder: Path) -> dict[str, str]:
    """Return what lets torch find a CUDA compiler that came as wheels; nothing where none did."""
    home = Path(python).parent.parent / "lib" / f"python{PYTHON}" / "site-packages" / "nvidia" / "cu13"
    if not (home / "bin" / "nvcc").is_file():
        return {}
    (folder / "libcudart.so").symlink_to(next((home / "lib").glob("libcudart.so.*")))
    path = f"{Path(python).parent}:{os.environ['PATH']}"
    return {"CUDA_HOME": str(home), "LIBRARY_PATH": str(folder), "PATH": path}


def finish(kind: str, process: "subprocess.Popen[bytes]", log: Path, seconds: float) -> None:
    """Wait for one compilation.

    Raises:
        CheckFailed: it failed, or took too long.
    """
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired as e:
        raise CheckFailed(f"{kind} was not compiled within {seconds:g} s") from e
    if code:
        said = [line[:300] for line in log.read_text(errors="replace").splitlines() if "error" in line.lower()]
        raise CheckFailed(f"{kind} cannot be compiled (code {code}):\n" + "\n".join(said[:20]))


def build(carried: Path, site: Path) -> dict[str, Any]:
    """Install the peer from *carried* into *site* and return what :func:`checked` says.

    Raises:
        CheckFailed: the extension cannot be loaded, compiled here or there.
    """
    if not (carried / "made.json").is_file():
        raise CheckFailed(f"{carried}: nothing was fetched; run `python -m tools.peer_gpu fetch` where a network is")
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--target", str(site), *map(str, sorted((carried / "wheels").glob("*.whl")))]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        raise CheckFailed("the peer's wheels could not be installed; see above")
    made = json.loads((carried / "made.json").read_text())
    if fits(made):
        place(carried / "built", site)
        try:
            return checked(site)
        except CheckFailed as e:
            say(f"what was compiled before does not load here, so compile again: {e}")
    with tempfile.TemporaryDirectory() as folder:
        native(sys.executable, carried / "csrc", Path(folder), seconds=240)
        place(Path(folder), site)
    return checked(site)


def fits(made: dict[str, str]) -> bool:
    """True if the torch and the Python here are those that the extension was compiled for."""
    asked = "import sys, torch; print(torch.__version__, '%d.%d' % sys.version_info[:2])"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False).stdout.split()
    if said != [made["torch"], made["python"]]:
        say(f"compiled for torch {made['torch']} and Python {made['python']}; here is {' '.join(said)}: compile again")
    return said == [made["torch"], made["python"]]


def place(built: Path, site: Path) -> None:
    """Put compiled libraries in place of the wheel's."""
    for kind in ("cuda_ops", "lmcache_native"):
        (made,) = built.glob(f"{kind}.*.so")
        for old in (site / "lmcache").glob(f"{kind}.*.so"):
            old.unlink()
        shutil.copy2(made, site / "lmcache" / made.name)


def checked(site: Path) -> dict[str, Any]:
    """Load the extension in a process of its own; returns where from, and for which torch.

    Raises:
        CheckFailed: it cannot be loaded, is not the one in *site*, or the peer does not use it.
    """
    if not (site / "lmcache").is_dir():
        raise CheckFailed(f"--site {site}: the peer is not there; run `python3 tools/peer_gpu.py build --into {site}`")
    command = [sys.executable, "-c", CHECK]
    try:
        done = subprocess.run(
            command, env=quiet(site), capture_output=True, text=True, check=False, timeout=CHECK_S, cwd=site
        )
    except subprocess.TimeoutExpired as e:
        raise CheckFailed(f"loading the peer's extension did not end within {CHECK_S:g} s") from e
    if done.returncode:
        raise CheckFailed(f"the peer's extension does not load:\n{done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not str(said["cuda_ops"]).startswith(str(site.resolve())):
        raise CheckFailed(f"another extension is loaded: {said['cuda_ops']}")
    if said.get("bound") is False:
        raise CheckFailed("the peer loads its extension but does not use it")
    return said | {"lmcache": VERSION}


def quiet(site: Path) -> dict[str, str]:
    """Return an environment for the peer's processes: its packages first, nobody told of its use."""
    return os.environ | {
        "PYTHONPATH": str(site.resolve()),
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": os.environ.get("LMCACHE_LOG_LEVEL", "WARNING"),
        "PYTHONWARNINGS": "ignore",
    }


def say(text: str) -> None:
    """Tell the person who waits."""
    print(f"peer_gpu: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
