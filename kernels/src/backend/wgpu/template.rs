//! A preprocessor that unrolls the kernels in kernels/wgsl before the driver compiles them. Unrolling by a driver
//! differs between drivers and stops at the loop bounds that wgpu adds. Only integers are substituted, so a kernel's
//! text never comes from input.
//!
//! `#for i in A..B` ... `#end` repeats lines; `#if E` ... `#else` ... `#end` chooses them; `$name` and `${E}` insert a
//! number. E: integers, names, + - * / %, == != < > <= >=, && ||, parentheses. `#piece NAME A B` ... `#end` defines
//! lines, and each later `#use NAME a b` inserts them with `a` for `A` and `b` for `B`.

/// Names and their numbers, innermost last.
pub type Numbers<'a> = Vec<(&'a str, i64)>;

/// A template that does not expand: an error in a kernel's file, found by the tests of all kernels.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of a kernel: {reason}: `{text}`")]
pub struct TemplateError {
    /// Line, from 1.
    pub line: usize,
    /// What is wrong.
    pub reason: &'static str,
    /// The text that caused the error.
    pub text: String,
}

/// Expands all directives in a kernel's text.
pub fn expand(text: &str, numbers: &[(&str, i64)]) -> Result<String, TemplateError> {
    let text = &with_pieces(text)?;
    let lines: Vec<&str> = text.lines().collect();
    let mut out = String::with_capacity(text.len() * 4);
    let mut numbers = numbers.to_vec();
    let stop = block(&lines, 0, &mut numbers, Some(&mut out))?;
    if stop < lines.len() {
        return Err(TemplateError {
            line: stop + 1,
            reason: "nothing is open here",
            text: lines[stop].into(),
        });
    }
    Ok(out)
}

/// Replaces every `#use` by its piece.
fn with_pieces(text: &str) -> Result<String, TemplateError> {
    let (mut pieces, mut out) = (Vec::<(Vec<&str>, String)>::new(), String::with_capacity(text.len()));
    let mut lines = text.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        let error = |reason| TemplateError { line: at + 1, reason, text: line.into() };
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["#piece", names @ ..] => {
                let mut open = 1;
                let body = lines.by_ref().map(|(_, line)| line).take_while(|line| {
                    match line.split_whitespace().next() {
                        Some("#for" | "#if") => open += 1,
                        Some("#end") => open -= 1,
                        _ => {}
                    }
                    open > 0
                });
                pieces.push((names.to_vec(), body.flat_map(|line| [line, "\n"]).collect()));
            }
            ["#use", values @ ..] => {
                let fits = |names: &[&str]| names.len() == values.len() && names.first() == values.first();
                let (names, body) =
                    pieces.iter().find(|(names, _)| fits(names)).ok_or(error("no such piece"))?;
                let put = |body: String, (name, value): (&&str, &&str)| body.replace(name, value);
                out += &names.iter().zip(values).skip(1).fold(body.clone(), put);
            }
            _ => out.extend([line, "\n"]),
        }
    }
    Ok(out)
}

/// Expands lines from `at` to the directive that closes the block, and returns that directive's line. Without `out`,
/// only finds that line.
fn block<'a>(
    lines: &[&'a str],
    mut at: usize,
    numbers: &mut Numbers<'a>,
    mut out: Option<&mut String>,
) -> Result<usize, TemplateError> {
    while at < lines.len() {
        let line = lines[at];
        let error = |reason| TemplateError { line: at + 1, reason, text: line.trim().into() };
        match line.trim_start().split_once(' ').unwrap_or((line.trim(), "")) {
            ("#end" | "#else", _) => return Ok(at),
            ("#for", rest) => {
                let (name, range) = rest.split_once(" in ").ok_or(error("`#for i in A..B`"))?;
                let (from, to) = range.split_once("..").ok_or(error("`#for i in A..B`"))?;
                let mut end = block(lines, at + 1, numbers, None)?;
                if let Some(out) = out.as_deref_mut() {
                    for i in value(from, numbers).map_err(&error)?..value(to, numbers).map_err(&error)? {
                        numbers.push((name.trim(), i));
                        end = block(lines, at + 1, numbers, Some(&mut *out))?;
                        numbers.pop();
                    }
                }
                at = closed(lines, end, "#end").ok_or(error("no #end"))?;
            }
            ("#if", rest) => {
                let yes = out.is_some() && value(rest, numbers).map_err(&error)? != 0;
                let no = out.is_some() && !yes;
                let mut end = block(lines, at + 1, numbers, out.as_deref_mut().filter(|_| yes))?;
                if closed(lines, end, "#else").is_some() {
                    end = block(lines, end + 1, numbers, out.as_deref_mut().filter(|_| no))?;
                }
                at = closed(lines, end, "#end").ok_or(error("no #end"))?;
            }
            _ => {
                if let Some(out) = out.as_deref_mut() {
                    put(line, numbers, out).map_err(&error)?;
                }
            }
        }
        at += 1;
    }
    Ok(at)
}

fn closed(lines: &[&str], at: usize, by: &str) -> Option<usize> {
    lines.get(at).filter(|l| l.trim() == by).map(|_| at)
}

/// Substitutes the numbers in a line.
fn put(line: &str, numbers: &Numbers, out: &mut String) -> Result<(), &'static str> {
    let mut rest = line;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let (piece, after) = match rest.strip_prefix('{') {
            Some(inner) => inner.split_once('}').ok_or("`${` without `}`")?,
            None => rest.split_at(name_length(rest)),
        };
        out.push_str(&value(piece, numbers)?.to_string());
        rest = after;
    }
    out.push_str(rest);
    out.push('\n');
    Ok(())
}

fn name_length(text: &str) -> usize {
    text.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(text.len())
}

fn value(text: &str, numbers: &Numbers) -> Result<i64, &'static str> {
    let mut rest = text.trim();
    let value = sum(&mut rest, numbers, 0)?;
    if rest.trim().is_empty() { Ok(value) } else { Err("an expression goes on after its end") }
}

/// Operators by precedence, lowest first; longer ones first within a level.
const LEVELS: [&[&str]; 5] =
    [&["||"], &["&&"], &["==", "!=", "<=", ">=", "<", ">"], &["+", "-"], &["*", "/", "%"]];

fn sum(rest: &mut &str, numbers: &Numbers, level: usize) -> Result<i64, &'static str> {
    let Some(operators) = LEVELS.get(level) else { return atom(rest, numbers) };
    let mut left = sum(rest, numbers, level + 1)?;
    loop {
        let text = rest.trim_start();
        let Some(operator) = operators.iter().find(|o| text.starts_with(**o)) else { return Ok(left) };
        *rest = &text[operator.len()..];
        let right = sum(rest, numbers, level + 1)?;
        let result = match *operator {
            "||" => Some(i64::from(left != 0 || right != 0)),
            "&&" => Some(i64::from(left != 0 && right != 0)),
            "==" => Some(i64::from(left == right)),
            "!=" => Some(i64::from(left != right)),
            "<=" => Some(i64::from(left <= right)),
            ">=" => Some(i64::from(left >= right)),
            "<" => Some(i64::from(left < right)),
            ">" => Some(i64::from(left > right)),
            "+" => left.checked_add(right),
            "-" => left.checked_sub(right),
            "*" => left.checked_mul(right),
            "/" => left.checked_div(right),
            _ => left.checked_rem(right),
        };
        left = result.ok_or("a number that does not exist")?;
    }
}

fn atom(rest: &mut &str, numbers: &Numbers) -> Result<i64, &'static str> {
    let text = rest.trim_start();
    if let Some(inner) = text.strip_prefix('(') {
        *rest = inner;
        let value = sum(rest, numbers, 0)?;
        *rest = rest.trim_start().strip_prefix(')').ok_or("no `)`")?;
        return Ok(value);
    }
    let (word, after) = text.split_at(name_length(text));
    *rest = after;
    if let Ok(number) = word.parse() {
        return Ok(number);
    }
    numbers.iter().rev().find(|(name, _)| *name == word).map(|(_, v)| *v).ok_or("a name without a number")
}

#[cfg(test)]
mod tests {
    use super::expand;

    #[test]
    fn directives_nest_and_errors_name_a_line() {
        let text = "#for i in 0..N\n#if i % 2 == 0 && N > 1\na$i ${i * 2 + 1};\n#else\n#for j in i..(i + 1)\nb${j};\n#end\n#end\n#end\nz";
        assert_eq!(expand(text, &[("N", 3)]), Ok("a0 1;\nb1;\na2 5;\nz\n".into()));
        assert_eq!(expand("#if 0\n$x\n#end\ny", &[]), Ok("y\n".into()));
        let text = "#piece add TO N\nTO_sum += $N;\n#end\n#use add a I\n#use add b 7";
        assert_eq!(expand(text, &[("I", 3)]).unwrap_or_default().lines().next(), Some("a_sum += 3;"));
        for (text, line) in [
            ("#use add a 1", 1),
            ("#piece add TO\n#end\n#use add a b", 3),
            ("a\n$x", 2),
            ("#for i in 0..2\nx", 1),
            ("x\n#end", 2),
            ("${1/0}", 1),
            ("${1 + }", 1),
            ("#if 1\n#else\n", 1),
            ("${(1}", 1),
            ("${1", 1),
        ] {
            assert_eq!(expand(text, &[]).map_err(|e| e.line), Err(line), "{text}");
        }
    }
}
