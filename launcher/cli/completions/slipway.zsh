#compdef slipway
# Completion of `slipway` for zsh: source <(slipway completion zsh)

_slipway_command() {
    # What the shell has to know of the command "$1": sets options, valued, kind.
    case $1 in
    # @commands
    esac
}

_slipway() {
    local current=${words[CURRENT]} options='' valued='' kind='' command='' next=2
    local before=${words[CURRENT-1]}
    local -a found

    # The verb, and the verb of a verb.
    _slipway_command ''
    while (( next < CURRENT )) && [[ -n ${words[next]} && " $kind " == *" ${words[next]} "* ]]; do
        command+="${command:+ }${words[next]}"
        options='' valued='' kind=''
        _slipway_command "$command"
        (( next++ ))
    done

    if [[ -n $valued && $valued == *"|$before|"* ]]; then
        _files
    elif [[ $current == -* ]]; then
        compadd -- ${=options}
    elif [[ $kind == (overrides|runs|recipes|images) ]]; then
        found=(${(f)"$(${words[1]} completion words $kind "$current" ${words[next,CURRENT-1]} 2> /dev/null)"})
        # What goes on gets no space.
        compadd -S '' -- ${(M)found:#*[=.]}
        compadd -- ${found:#*[=.]}
    elif [[ -n $kind && ( -n $command || $CURRENT == 2 ) ]]; then
        compadd -- ${=kind}
    else
        _files
    fi
}

(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _slipway slipway
