# bash: commands, config files and keys of maxdiffusion and ./run. Loaded automatically where the program was installed into
# a prefix that bash-completion reads; else: source <(maxdiffusion completion bash)
_maxdiffusion() {
  local program=${COMP_WORDS[0]} word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} words=
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    words=$("$program" help 2>/dev/null | sed -nE 's/^  ([a-z_]+)( .*)?$/\1/p')
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
  elif [[ -n $word && $word != [=./~]* && $word != */* && $before != = ]]; then  # bash cuts words at `=`
    words=$("$program" help "${COMP_WORDS[1]}" 2>/dev/null | sed -nE 's/^  ([A-Za-z0-9_]+): .*/\1/p')
    mapfile -t COMPREPLY < <(compgen -W "$words" -S = -- "$word")
    ((${#COMPREPLY[@]} == 0)) || compopt -o nospace 2>/dev/null
  fi
}
complete -o default -F _maxdiffusion maxdiffusion ./run
