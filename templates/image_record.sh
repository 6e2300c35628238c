recorded() { # recorded KEY IMAGE: what the record beside an image says, if that is of the file as it is
    local record=$2.json state
    state=$(stat --dereference --format='%s %Y' "$2" 2>/dev/null) || return 0
    if [[ -f $record && $state == "$(sed -n 's/^  "size": \([0-9]*\),*$/\1/p' "$record") $(sed -n 's/^  "modified": \([0-9]*\),*$/\1/p' "$record")" ]]; then
        sed -n "s/^  \"$1\": \"\(sha256:\)\{0,1\}\([0-9a-f]\{64\}\)\",*\$/\2/p" "$record"
    fi
}
