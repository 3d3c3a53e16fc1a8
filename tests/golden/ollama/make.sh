#!/usr/bin/env bash
# Writes go.json beside this script: the output of Go's text/template for the Go templates in src/cli/export/go.rs and
# their five conversations, with the values that Ollama passes (.Messages with .Role and .Content, .System). Needs: go,
# python3.
# usage: make.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 - "$here/../../../src/cli/export/go.rs" > "$work/in.json" <<'PY'
import json, re, sys
source = open(sys.argv[1], encoding="utf-8").read()
def text(quoted):  # a Rust string literal
    quoted = re.sub(r"\\\n\s*", "", quoted)
    quoted = re.sub(r"\\u\{([0-9a-f]+)\}", lambda m: chr(int(m[1], 16)), quoted)
    return quoted.replace('\\"', '"').replace("\\n", "\n")
STRING = r'"((?:[^"\\]|\\.|\\\n)*)"'
consts = {n: text(t) for n, t in re.findall(r'const (\w+): &str = ' + STRING, source, re.S)}
families = re.findall(r'Family \{ name: "([^"]+)", template: (\w+)', source)
part = source[source.index("pub const CONVERSATIONS"):source.index("/// A way of writing turns")]
talks = [[(text(r), text(c)) for r, c in re.findall(r'\(' + STRING + r', ' + STRING + r'\)', talk)]
         for talk in re.findall(r'&\[\s*(\(.*?\)),?\s*\],', part, re.S)]
assert len(talks) == 5 and len(families) == 4, (len(talks), len(families))
json.dump({"families": [{"Name": n, "Template": consts[c]} for n, c in families],
           "talks": [[{"Role": r, "Content": c} for r, c in talk] for talk in talks]}, sys.stdout)
PY
cat > "$work/main.go" <<'GO'
package main

import (
	"bytes"
	"encoding/json"
	"os"
	"text/template"
)

type turn struct{ Role, Content string }

func main() {
	var in struct {
		Families []struct{ Name, Template string }
		Talks    [][]turn
	}
	if err := json.NewDecoder(os.Stdin).Decode(&in); err != nil {
		panic(err)
	}
	type made struct {
		Name     string   `json:"name"`
		Template string   `json:"template"`
		Texts    []string `json:"texts"`
	}
	var out []made
	for _, f := range in.Families {
		t := template.Must(template.New("").Option("missingkey=zero").Parse(f.Template))
		m := made{Name: f.Name, Template: f.Template}
		for _, talk := range in.Talks {
			system := ""
			for _, t := range talk {
				if t.Role == "system" {
					system = t.Content
				}
			}
			var b bytes.Buffer
			if err := t.Execute(&b, map[string]any{"Messages": talk, "System": system, "Response": ""}); err != nil {
				panic(err)
			}
			m.Texts = append(m.Texts, b.String())
		}
		out = append(out, m)
	}
	e := json.NewEncoder(os.Stdout)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	e.Encode(out)
}
GO
(cd "$work" && "${GO:-go}" run main.go < in.json) > "$here/go.json"
