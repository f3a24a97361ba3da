"""The two things pyproject.toml cannot say: packages under another name, and one file that lies above the package.

``heads/`` and ``backbones/`` lie at the root of the repository and are ``repairzoo.heads`` and ``repairzoo.backbones``
when installed; a folder added to either is found without a change here. ``registry.yaml`` lies at the root too: a build
copies it into the package, an editable install reads it where it is (see ``repairzoo/registry.py``).
"""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

MAPPED = ("backbones", "heads")


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "repairzoo")
            self.mkpath(str(target))
            self.copy_file("registry.yaml", str(target / "registry.yaml"))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib, "repairzoo", "registry.yaml"))]


packages = find_packages(".", include=["repairzoo", "repairzoo.*"])
for folder in MAPPED:
    packages += [f"repairzoo.{folder}"] + [f"repairzoo.{folder}.{name}" for name in find_packages(folder)]

setup(
    packages=packages,
    package_dir={"repairzoo": "repairzoo", **{f"repairzoo.{folder}": folder for folder in MAPPED}},
    cmdclass={"build_py": BuildPy},
)
