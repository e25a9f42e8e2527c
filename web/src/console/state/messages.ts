// Decoding the relay's messages, and the URL of its WebSocket.

export interface Message {
  readonly type: string;
  readonly subscription_id?: string;
  readonly client_msg_id?: string;
  readonly packet?: Readonly<Record<string, unknown>>;
  readonly text?: string;
  readonly received_at?: number;
  readonly cursor?: string;
  readonly relay_annotations?: Readonly<Record<string, unknown>>;
  readonly complete?: boolean;
  readonly code?: string;
  readonly reason?: string;
  readonly detail?: string;
  readonly retry_after?: number;
  readonly challenge?: string;
  readonly server_id?: string;
  readonly expires_at?: number;
  readonly author_id?: string;
  readonly capabilities?: readonly string[];
  readonly packet_id?: string;
  readonly duplicate?: boolean;
  readonly status?: string;
  readonly changed?: boolean;
  readonly entries?: readonly Readonly<Record<string, unknown>>[];
  readonly next?: string;
  readonly total?: number;
  readonly silent?: number;
}

const PACKET = ',"packet":';
const BEHIND = ',"received_at":';

/**
 * Decode one frame; null if it is not a message. An EVENT gets the `text` of its packet, which says the same as its
 * `packet`: the packet shown is the packet checked.
 */
export function readMessage(frame: string): Message | null {
  const event = asEvent(frame);
  if (event !== undefined) return event;
  const message = parsed<Message>(frame);
  if (typeof message?.type !== "string") return null;
  if (message.type !== "EVENT") return message;
  const { packet } = message;
  return typeof packet === "object" && packet !== null ? { ...message, text: JSON.stringify(packet) } : null;
}

/**
 * Decode an EVENT in the form that relayd writes, and cut out the packet's own bytes, which its id and signature cover.
 * Undefined for any other frame, such as one in which something like a packet is elsewhere.
 */
function asEvent(frame: string): Message | undefined {
  const start = frame.indexOf(PACKET) + PACKET.length;
  const end = frame.lastIndexOf(BEHIND);
  if (start < PACKET.length || end < start) return undefined;
  const rest = parsed<Message>(`${frame.slice(0, start)}null${frame.slice(end)}`);
  if (rest?.type !== "EVENT" || rest.packet !== null) return undefined;
  const text = frame.slice(start, end);
  const packet = parsed<Readonly<Record<string, unknown>>>(text);
  return packet && { ...rest, packet, text };
}

/** Decode a JSON object; its members are unchecked. */
function parsed<T extends object>(text: string): T | undefined {
  try {
    const value = JSON.parse(text) as T | null;
    return typeof value === "object" && value !== null ? value : undefined;
  } catch {
    return undefined;
  }
}

function setting(name: string): string {
  return document.querySelector<HTMLMetaElement>(`meta[name="strata-${name}"]`)?.content ?? "";
}

/**
 * The relay's public URL if this page was loaded from its host, else the URL relative to the page. A page that came over
 * https may open no ws URL: browsers throw.
 */
export function openingUrl(): string {
  const here = new URL(setting("socket"), new URL(".", location.href));
  here.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  const publicUrl = setting("public");
  const { host, protocol } = new URL(publicUrl || here);
  return publicUrl && host === location.host && (protocol === "wss:" || here.protocol === "ws:") ? publicUrl : here.href;
}
