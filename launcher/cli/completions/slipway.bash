# Completion of `slipway` for bash: source <(slipway completion bash)

_slipway_command() {
    # What the shell has to know of the command "$1": sets options, valued, kind.
    case $1 in
    # @commands
    esac
}

_slipway() {
    local line=${COMP_LINE:0:COMP_POINT} IFS=$' \t\n'
    local current=${line##*[[:space:]]} options='' valued='' kind='' command='' next=1 before
    local -a words
    COMPREPLY=()
    # COMP_WORDS is cut at = and :, where an override goes on.
    read -ra words <<< "$line"
    [[ -z $current ]] || unset 'words[-1]'
    before=${words[-1]-}

    # The verb, and the verb of a verb.
    _slipway_command ''
    while [[ -n ${words[next]-} && " $kind " == *" ${words[next]} "* ]]; do
        command+="${command:+ }${words[next]}"
        options='' valued='' kind=''
        _slipway_command "$command"
        next=$((next + 1))
    done

    if [[ -n $valued && $valued == *"|$before|"* ]]; then
        return # its value: files
    elif [[ $current == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$current")
    elif [[ $kind == @(overrides|runs|recipes|images) ]]; then
        mapfile -t COMPREPLY < <("${words[0]}" completion words "$kind" "$current" "${words[@]:next}" 2> /dev/null)
    elif [[ -n $kind && (-n $command || ${#words[@]} == 1) ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$kind" -- "$current")
    fi

    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]]; then
        compopt -o nospace 2> /dev/null
    fi
    # readline puts a candidate in the place of what follows the last = or :.
    if [[ $current == *[=:]* && $COMP_WORDBREAKS == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*[=:]}"}"}")
    fi
}

complete -o bashdefault -o default -F _slipway slipway
