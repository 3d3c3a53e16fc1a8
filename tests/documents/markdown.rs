//! Commands of a document, and the comparison of the output that it shows with the real one.

/// One fenced block.
#[derive(Debug, PartialEq)]
pub struct Block {
    /// 1-based line of the fence.
    pub line: usize,
    /// The word after the fence.
    pub kind: String,
    /// Of `<!-- not run: reason -->` in the line above the fence.
    pub not_run: Option<String>,
    pub lines: Vec<String>,
}

/// One command of a block, and the output that follows it there.
#[derive(Debug, PartialEq)]
pub struct Command {
    pub line: usize,
    /// The word before `$ `: commands with the same word share a home folder.
    pub machine: String,
    pub text: String,
    pub shown: Vec<String>,
}

pub fn blocks(text: &str) -> Vec<Block> {
    let (mut found, mut open, mut above): (Vec<Block>, bool, &str) = (Vec::new(), false, "");
    for (n, line) in text.lines().enumerate() {
        if let Some(kind) = line.strip_prefix("```") {
            open = !open;
            if open {
                let reason = above.strip_prefix("<!-- not run: ").and_then(|rest| rest.strip_suffix(" -->"));
                let not_run = reason.map(str::to_string);
                found.push(Block { line: n + 1, kind: kind.into(), not_run, lines: Vec::new() });
            }
        } else if open && let Some(block) = found.last_mut() {
            block.lines.push(line.into());
        }
        above = line;
    }
    found
}

/// A command begins with `$ ` or `machine$ `, and continues while a quote is open or a line ends with a backslash.
pub fn commands(block: &Block) -> Vec<Command> {
    let mut found: Vec<Command> = Vec::new();
    for (n, line) in block.lines.iter().enumerate() {
        if let Some(last) = found.last_mut()
            && last.shown.is_empty()
            && (last.text.matches('\'').count() % 2 == 1 || last.text.ends_with('\\'))
        {
            last.text += &format!("\n{line}");
        } else if let Some((machine, text)) = prompt(line) {
            let (machine, text) = (machine.to_string(), text.to_string());
            found.push(Command { line: block.line + n + 1, machine, text, shown: Vec::new() });
        } else if let Some(last) = found.last_mut() {
            last.shown.push(line.clone());
        }
    }
    for command in &mut found {
        let kept = command.shown.iter().rposition(|line| !line.trim().is_empty()).map_or(0, |at| at + 1);
        command.shown.truncate(kept);
    }
    found
}

fn prompt(line: &str) -> Option<(&str, &str)> {
    let (machine, text) = line.split_once("$ ")?;
    machine.chars().all(|c| c.is_ascii_lowercase()).then_some((machine, text))
}

/// The line without what differs between runs and machines: words with digits, units, bars, and answers of a model.
pub fn shape(line: &str) -> String {
    // A generated answer, and the row's own where that differs.
    if let Some(mark) =
        ["-> ", "before ", "after ", "row "].iter().find(|m| line.trim_start().starts_with(*m))
    {
        return mark.trim().into();
    }
    // `device   cpu: CLASS on PROCESSOR, 2 threads`
    let processor = line
        .strip_prefix("device ")
        .and_then(|rest| rest.split_once(" on ")?.1.split_once(", "))
        .map(|p| p.0);
    let line = processor.map_or(line.to_string(), |name| line.replace(name, "#"));
    let mut words: Vec<&str> = Vec::new();
    for word in line.split_whitespace() {
        let bare = word.trim_end_matches([',', ';', ':', ')']);
        if words.last() == Some(&"#") && ["B", "kB", "MB", "GB", "ns", "ms", "s"].contains(&bare) {
            continue;
        }
        let varies = word.contains(|c: char| c.is_ascii_digit()) || bare.chars().all(|c| "#=>-".contains(c));
        words.push(match word {
            _ if varies => "#",
            // 2 microbatches may be 1 microbatch.
            _ if words.last() == Some(&"#") => bare.trim_end_matches('s').trim_end_matches('e'),
            _ => word,
        });
    }
    words.join(" ")
}

/// Lines of one machine only, those of a slow one (kernels/src/support/waiting.rs), and empty ones.
fn depends_on_the_machine(line: &str) -> bool {
    line.is_empty()
        || line.starts_with("note: computes on the CPU: no GPU found")
        || line.ends_with(" s so far")
        || (line.ends_with(" ...") && line.trim() != "...")
}

/// Whether the real output has the shape that is shown; a shown `...` stands for any lines. The error names the shown
/// line that is not there.
pub fn compare(shown: &[String], real: &str) -> Result<(), String> {
    let real: Vec<String> = real.lines().filter(|l| !depends_on_the_machine(l)).map(shape).collect();
    // After the shown lines so far: how many real lines may have been read.
    let mut at: Vec<usize> = vec![0];
    for line in shown.iter().filter(|l| !depends_on_the_machine(l)) {
        let next: Vec<usize> = if line.trim() == "..." {
            (at[0]..=real.len()).collect()
        } else {
            let want = shape(line);
            at.iter().filter(|&&n| real.get(n) == Some(&want)).map(|n| n + 1).collect()
        };
        if next.is_empty() {
            return Err(format!("the output has no line like this, here: {line}"));
        }
        at = next;
    }
    match at.last() == Some(&real.len()) {
        true => Ok(()),
        false => Err("the output goes on after the last line that is shown".into()),
    }
}

#[test]
fn commands_are_found_with_their_output() {
    let text = "x\n<!-- not run: no network -->\n```console\n$ a b\none\n\nfirst$ c 'd\ne'\n$ f\n```\n```text\n$ g\n```\n";
    let found = blocks(text);
    let kinds: Vec<_> = found.iter().map(|b| (b.line, b.kind.as_str(), b.not_run.as_deref())).collect();
    assert_eq!(kinds, [(3, "console", Some("no network")), (11, "text", None)]);
    let commands = commands(&found[0]);
    let read: Vec<_> = commands.iter().map(|c| (c.line, &*c.machine, &*c.text, c.shown.len())).collect();
    assert_eq!(read, [(4, "", "a b", 1), (7, "first", "c 'd\ne'", 0), (9, "", "f", 0)]);
}

#[test]
fn lines_of_a_slow_machine_are_not_compared() {
    let shown = ["read back: logits within 8.6e-6".to_string()];
    let real = "reads the base ...\nreads the base: 40 %, 4 s so far\nread back: logits within 9.1e-6";
    assert_eq!(compare(&shown, real), Ok(()));
    assert!(compare(&shown, "so far\nread back: logits within 9.1e-6").is_err());
}

#[test]
fn lines_that_differ_in_more_than_numbers_are_found() {
    let real = "note: computes on the CPU: no GPU found (x)\nloss 4.1 (2 %)\nmemory 3 MB, in all\n  -> yes\nadapter  out\n";
    let same = |shown: &str| {
        let shown: Vec<String> = shown.lines().map(String::from).collect();
        compare(&shown, real).is_ok()
    };
    for fine in [
        "loss 9 (17 %)\nmemory 21.5 kB, in all\n  -> no\nadapter  out",
        "...\nadapter out",
        "loss 1 (1 %)\n...\nadapter  out",
        "...\nmemory 1 B, in all\n...",
    ] {
        assert!(same(fine), "{fine}");
    }
    for wrong in [
        "loss 9 (17 %)",
        "loss 9\n...",
        "...\nadapter  in",
        "loss 9 (17 %)\nadapter  out",
        "...\nadapter  out\nreport  out",
        "loss 1 (1 %)\nmemory 1 B, in\n...",
    ] {
        assert!(!same(wrong), "{wrong}");
    }
}
