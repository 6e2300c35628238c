#!/bin/bash
# stage_image.sh SOURCE TARGET STATE: copies an image file to this node's own disk, once for all jobs of this user here.
# STATE is the source's size and time, as the job found them. The exit code is 0 where TARGET is a whole copy.
set -euo pipefail
set +o posix # a POSIXLY_CORRECT in the environment would change what bash means
set +xv # a SHELLOPTS in the environment would print the values of secrets

source=$1 target=$2 state=$3
directory=${target%/*} name=${target##*/} bytes=${3%% *}
say() { echo "${SLURMD_NODENAME:-$HOSTNAME}: $*" >&2 || true; }
leave() {
    say "$*"
    exit 1
}
free_bytes() { df --output=avail --block-size=1 -- "$directory" | tail -n 1; }

is_whole() { [[ -f $target && $(stat --format=%s -- "$target") == "$bytes" ]]; }
take_it() {
    touch -- "$target" # in use: the last to be removed
    exit 0
}

umask 077 # the copies are this user's: nobody else can put another image in their place
mkdir -p -- "$directory" || leave "no directory $directory can be made here"
[[ -O $directory && ! -L $directory ]] || leave "$directory is another user's"

! is_whole || take_it
exec 9>"$directory/.$name.lock"
if command -v flock >/dev/null && ! flock --nonblock 9; then
    say "another job copies $source here just now: waiting for it"
    flock 9
fi
! is_whole || take_it

temporary=$directory/.$name.new # only who has the lock writes it; what is there is of one that was killed
rm -f -- "$temporary"
trap 'rm -f -- "$temporary"' EXIT
trap 'exit 143' TERM INT
if (($(free_bytes) < bytes)); then
    # Copies that no job asked for since yesterday. One that a job has mounted stays until that ends.
    find "$directory" -maxdepth 1 -type f -name '*.sqsh' -mmin +1440 -delete
fi
free=$(free_bytes)
((free >= bytes)) || leave "no room in $directory for $source: $bytes bytes, and $free are free"
cp -- "$source" "$temporary" || leave "$source could not be copied to $directory"
[[ $(stat --format=%s -- "$temporary") == "$bytes" &&
    $(stat --dereference --format='%s %Y' -- "$source") == "$state" ]] ||
    leave "$source changed while it was copied"
mv -f -- "$temporary" "$target"
