#!/usr/bin/env bash
# Make the release of this commit in dist/VERSION: the wheel, its source distribution, the SBOM of the wheel with its
# dependencies (CycloneDX), their SHA-256; then tag the commit. It uploads nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "release: $*" >&2; exit 2; }

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' slipway/__init__.py)
tag=v$version out=dist/$version
[ -z "$(git status --porcelain)" ] || fail "the working tree has changes that are not committed"
grep -Eq "^## $version - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md ||
    fail "CHANGELOG.md has no heading '## $version - $(date +%F)'; valid: the version of slipway/__init__.py and a date"
git rev-parse -q --verify "refs/tags/$tag" >/dev/null && fail "the tag $tag is there already"
[ ! -e "$out" ] || fail "$out is there already"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git archive --prefix=source/ HEAD | tar -x -C "$work"
(cd "$work/source" && "$OLDPWD/.venv/bin/python" -m build --no-isolation --outdir "$work/out")
python=$work/venv/bin/python
pip() { .venv/bin/python -m pip --python "$work/$1/bin/python" install --quiet --disable-pip-version-check "${@:2}"; }
for name in venv tool; do .venv/bin/python -m venv --without-pip "$work/$name"; done
pip venv "$work"/out/*.whl
# In an environment of its own, as the SBOM is of the wheel alone.
pip tool 'cyclonedx-bom>=7.2,<8'
"$work/tool/bin/cyclonedx-py" environment --output-reproducible --output-file "$work/out/slipway-$version.cdx.json" "$python"
(cd "$work/out" && sha256sum -- * >SHA256SUMS)
mkdir -p dist
mv "$work/out" "$out"
git tag --annotate --message "Slipway $version" "$tag"
echo "$out:"
cat "$out/SHA256SUMS"
echo "tagged $tag; to publish it: git push origin $tag"
