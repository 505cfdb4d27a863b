"""Run by a web UI before it starts: installs what the Merge tab needs and the host lacks, and moves no version."""

import launch

# Packages that no host pins. Without plotly the tab works, and its tables stand in for the charts.
NEEDED = ("click", "tqdm", "msgspec", "platformdirs", "plotly")

for package in NEEDED:
    if not launch.is_installed(package):
        try:
            launch.run_pip(f"install {package}", f"{package} for the Merge tab")
        except Exception as error:  # without it the tab says what is missing
            print(f"Merge tab: {package} could not be installed: {error}")  # noqa: T201 - the host shows it
