//! SVG text. All text from outside is escaped here, and nowhere else.

use super::paint;
use crate::support::stderr::printable;
use std::fmt::Write;

/// Margin around a picture in a file, in pixels.
const EDGE: f64 = 10.0;

/// A picture under construction, in CSS pixels.
#[derive(Debug, Clone)]
pub struct Svg {
    width: f64,
    height: f64,
    title: String,
    body: String,
}

impl Svg {
    /// An empty picture; `title` is its text for screen readers.
    pub fn new(width: f64, height: f64, title: &str) -> Self {
        Svg { width, height, title: title.into(), body: String::new() }
    }

    /// A straight line.
    pub fn line(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        let _ = write!(
            self.body,
            r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#
        );
    }

    /// A line through two points or more.
    pub fn path(&mut self, class: &str, points: &[(f64, f64)]) {
        let mut d = String::new();
        for (i, (x, y)) in points.iter().enumerate() {
            let _ = write!(d, "{}{x:.1} {y:.1}", if i == 0 { "M" } else { "L" });
        }
        let _ = write!(self.body, r#"<path class="{class}" d="{d}"/>"#);
    }

    /// A dot with a tooltip.
    pub fn dot(&mut self, class: &str, (x, y): (f64, f64), tip: &str) {
        let title = tooltip(tip);
        let _ = write!(
            self.body,
            r#"<circle class="{class} dot" cx="{x:.1}" cy="{y:.1}" r="3.5">{title}</circle>"#
        );
    }

    /// A filled rectangle with round corners and a tooltip.
    pub fn block(&mut self, class: &str, (x, y, w, h): (f64, f64, f64, f64), tip: &str) {
        let (title, r) = (tooltip(tip), (w / 2.0).min(2.0));
        let _ = write!(
            self.body,
            r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" width="{w:.2}" height="{h:.1}" rx="{r:.1}">{title}</rect>"#
        );
    }

    /// A text; `anchor` is `start`, `middle` or `end`.
    pub fn text(&mut self, class: &str, (x, y): (f64, f64), anchor: &str, text: &str) {
        let text = escape(text);
        let _ = write!(
            self.body,
            r#"<text class="{class}" x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{text}</text>"#
        );
    }

    /// The picture without tooltips.
    pub fn without_tips(mut self) -> Self {
        let pieces = self.body.split("<title>");
        self.body =
            pieces.map(|piece| piece.split_once("</title>").map_or(piece, |(_, rest)| rest)).collect();
        self
    }

    /// The picture for the page, whose style sheet sets the colours.
    pub fn inline(&self) -> String {
        format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:.0} {h:.0}" role="img" aria-label="{title}">{body}</svg>"#,
            w = self.width,
            h = self.height,
            title = escape(&self.title),
            body = self.body,
        )
    }

    /// The picture as a separate file for any program (see `paint`), with a margin at each edge.
    pub fn alone(&self) -> String {
        let sheet = format!(r#"<rect class="paper" x="-{EDGE}" y="-{EDGE}" width="100%" height="100%"/>"#);
        format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{w:.0}" height="{h:.0}" viewBox="-{EDGE} -{EDGE} {w:.0} {h:.0}" role="img"{root}><title>{title}</title><style>{style}</style>{body}</svg>
"#,
            w = self.width + 2.0 * EDGE,
            h = self.height + 2.0 * EDGE,
            root = paint::root(),
            title = escape(&self.title),
            style = paint::style(),
            body = paint::painted(&[sheet.as_str(), &self.body].concat()),
        )
    }
}

fn tooltip(tip: &str) -> String {
    if tip.is_empty() { String::new() } else { format!("<title>{}</title>", escape(tip)) }
}

/// Escapes text for HTML and SVG, quotes included. Control and format characters (directions, zero width) are shown as
/// escape sequences, as on a terminal; line ends and tabs stay.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in printable(text).chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c => out.push(c),
        }
    }
    out
}

/// Shortens a label to `width` pixels. No font is measured: a character counts as 6.5 pixels.
pub fn fitting(text: &str, width: f64) -> String {
    let most = (width / 6.5).max(1.0) as usize;
    if text.chars().count() <= most {
        return text.into();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::escape;

    #[test]
    fn escaped_text_cannot_leave_its_element() {
        assert_eq!(escape("a<b>&\"'\n"), "a&lt;b&gt;&amp;&quot;&#39;\n");
        assert_eq!(escape("a\u{202e}b\u{200b}\x1b"), "a\\u{202e}b\\u{200b}\\u{1b}");
    }
}
