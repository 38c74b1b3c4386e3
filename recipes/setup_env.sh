# Sourced by quickstart.sh and tools/test.sh, from the root of the repository: activates .venv, after making it,
# installing the pinned requirements and building the package where any of them is not up to date.
#
# PYTHON chooses the interpreter (default: python3), INSTALLER the command that installs packages (default: python -m
# pip), MORE_REQUIREMENTS a second file of packages. MAX_JOBS limits compile jobs.

_fail() {
    echo "setup_env: error: $1" >&2
    exit 1
}

_setup_env() {
    local python="${PYTHON:-python3}" requirements=recipes/requirements.txt stamps=.venv/installed headers file files=() wanted stamp
    if [[ ! -f .venv/bin/activate ]]; then # which venv writes last: without python3-venv it leaves a .venv that has none
        command -v "$python" >/dev/null || _fail "$python is not installed; install Python 3.10 or newer"
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
            _fail "$("$python" --version) is too old; set PYTHON to a Python 3.10 or newer"
        command -v c++ >/dev/null || _fail "no C++ compiler (c++) found; install g++ or clang"
        headers="$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
        [[ -f "$headers/Python.h" ]] || _fail "there is no $headers/Python.h; install the headers of $python (python3-dev)"
        echo "== virtual environment: .venv ($("$python" --version))"
        "$python" -m venv --clear .venv || _fail "python -m venv failed; install the venv module of $python (python3-venv)"
    fi
    # shellcheck disable=SC1091
    source .venv/bin/activate
    local -x PIP_CONSTRAINT=/dev/null # an image's own names versions of what this environment does not see

    mkdir -p "$stamps"
    for file in "$requirements" ${MORE_REQUIREMENTS:+"$MORE_REQUIREMENTS"}; do
        cmp -s "$file" "$stamps/$file" || files+=("$file")
    done
    if ((${#files[@]})); then
        echo "== installing ${files[*]}"
        # Most modules are never imported: those that are get compiled then.
        ${INSTALLER:-python -m pip} install --quiet --no-compile "${files[@]/#/--requirement=}" ||
            _fail "${files[*]} could not be installed"
        cp --parents "${files[@]}" "$stamps"
    fi

    # A hash of all that the build reads; the editable install takes Python files from the checkout as they are.
    stamp=.venv/built-from.sha256
    wanted="$(find csrc setup.py CMakeLists.txt pyproject.toml "$requirements" -type f -print0 | sort -z |
        xargs -0 sha256sum | sha256sum)"
    if [[ ! -f "$stamp" || "$(cat "$stamp")" != "$wanted" ]] || ! python -c 'import torch, megatron_moe_opt._C' 2>/dev/null; then
        echo "== building megatron-moe-opt"
        python -m pip install --quiet --no-build-isolation --no-deps --editable . || _fail "the package was not built"
        echo "$wanted" >"$stamp"
    fi
}

_setup_env
